// SPDX-License-Identifier: Apache-2.0
// silu(gate) * up on a CPU: computed in floats, from numbers rounded to their type, and rounded twice.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::gate {

constexpr int64_t SHARE = 1 << 13;  // results of a task
constexpr float LOG2_E = 1.44269504088896341f;

// x / (1 + exp(-x)), by exp of what is not above 0.
inline Vector silu(Vector x) {
  const Vector zero = set(0.0f), one = set(1.0f);
  const Vector small = power_of_2(where_less(x, zero, x, zero - x) * set(LOG2_E));
  return x * where_less(x, zero, small, one) / (one + small);
}

// F pairs (gate, up), W at a time.
template <class T, class From>
void gated(const From* opened, int64_t F, T* out) {
  for (int64_t first = 0; first < F; first += W) {
    const int64_t count = std::min<int64_t>(W, F - first);
    float gates[W] = {}, ups[W] = {};
    for (int64_t i = 0; i < count; i++) {
      gates[i] = rounded<T>(opened[2 * (first + i)]);
      ups[i] = rounded<T>(opened[2 * (first + i) + 1]);
    }
    store(gates, silu(load(gates)));
    for (int64_t i = 0; i < count; i++) from_float(rounded<T>(gates[i]) * ups[i], out + first + i);
  }
}

template <class T, class From>
void run(const Call& call) {
  const Array opened = call.argument(0);
  const Live live = live_of(call.argument(1), opened);
  const int64_t F = call.result(0).last(), count = call.result(0).size() / F;
  const int64_t size = std::max<int64_t>(1, SHARE / F);
  auto work = [=, from = opened.data<From>(), out = call.result(0).data<T>()](int64_t task) {
    for (int64_t r = task * size; r < std::min(count, (task + 1) * size); r++) {
      if (live.has(r)) {
        gated(from + r * 2 * F, F, out + r * F);
      } else {
        std::fill_n(out + r * F, F, T{});
      }
    }
  };
  run_tasks(call, (count + size - 1) / size, true, std::move(work));
}

}  // namespace tsjax::gate

// Opened, live; its gated numbers.
extern "C" XLA_FFI_Error* tsjax_gated(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 2, .results = 1}, [](const Call& call) {
    if (call.result(0).is<float>()) {
      gate::run<float, float>(call);
    } else if (call.argument(0).is<float>()) {
      gate::run<bfloat16, float>(call);
    } else {
      gate::run<bfloat16, bfloat16>(call);
    }
  });
}
