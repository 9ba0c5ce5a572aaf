// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values of fresh rows on a CPU, rounded to their type before and after they turn.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::rotary {

constexpr int64_t SHARE = 1 << 14;  // numbers of a task

// A vector of H numbers turned, or as it is where there are no angles.
template <class T, class From>
void turned(const From* x, const float* cos, const float* sin, int64_t H, T* out) {
  if (!cos) {
    for (int64_t i = 0; i < H; i++) from_float(to_float(x[i]), out + i);
    return;
  }
  const int64_t half = H / 2;
  for (int64_t i = 0; i < half; i++) {
    const float first = rounded<T>(x[i]), second = rounded<T>(x[i + half]);
    from_float(first * cos[i] - second * sin[i], out + i);
    from_float(second * cos[i] + first * sin[i], out + i + half);
  }
}

template <class T, class From>
void run(const Call& call) {
  const Array fresh = call.argument(0);
  const int64_t rows_T = fresh.dim(1), K = fresh.dim(2), P = fresh.dim(3), H = fresh.dim(4);
  const int64_t count = fresh.dim(0) * rows_T, of_row = K * P * H, G = P - 2;
  const int64_t size = std::max<int64_t>(1, SHARE / of_row);
  const Live live = live_of(call.argument(3), fresh);
  auto work = [=, from = fresh.data<From>(), cos = call.argument(1).data<float>(),
               sin = call.argument(2).data<float>(), q = call.result(0).data<T>(),
               k = call.result(1).data<T>(), v = call.result(2).data<T>()](int64_t task) {
    for (int64_t r = task * size; r < std::min(count, (task + 1) * size); r++) {
      if (!live.has(r)) {
        std::fill_n(q + r * K * G * H, K * G * H, T{});
        std::fill_n(k + r * K * H, K * H, T{});
        std::fill_n(v + r * K * H, K * H, T{});
        continue;
      }
      const float *c = cos + r * (H / 2), *s = sin + r * (H / 2);
      for (int64_t head = 0; head < K; head++) {
        const From* x = from + (r * K + head) * P * H;
        for (int64_t g = 0; g < G; g++, x += H) turned(x, c, s, H, q + ((r * K + head) * G + g) * H);
        turned(x, c, s, H, k + (r * K + head) * H);
        turned<T, From>(x + H, nullptr, nullptr, H, v + (r * K + head) * H);
      }
    }
  };
  run_tasks(call, (count + size - 1) / size, true, std::move(work));
}

}  // namespace tsjax::rotary

// Fresh, cos, sin, live; queries, keys, values.
extern "C" XLA_FFI_Error* tsjax_rotary_heads(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 4, .results = 3}, [](const Call& call) {
    if (call.result(0).is<float>()) {
      rotary::run<float, float>(call);
    } else if (call.argument(0).is<float>()) {
      rotary::run<bfloat16, float>(call);
    } else {
      rotary::run<bfloat16, bfloat16>(call);
    }
  });
}
