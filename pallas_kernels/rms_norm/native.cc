// SPDX-License-Identifier: Apache-2.0
// Root mean square norms on a CPU. The sum of squares has W running parts as in product/native.cc,
// in the same order for any number of rows.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::norms {

constexpr int64_t SHARE = 1 << 15;  // numbers of a task

template <class T>
void normalize(const T* row, const T* weight, int64_t D, float eps, T* out) {
  Vector squares = set(0.0f);
  const int64_t whole = D / W * W;
  for (int64_t i = 0; i < whole; i += W) {
    Vector x = load(row + i);
    squares = fma(x, x, squares);
  }
  if (whole < D) {
    float rest[W] = {};
    for (int64_t i = whole; i < D; i++) rest[i - whole] = to_float(row[i]);
    squares = fma(load(rest), load(rest), squares);
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(D) + eps);
  for (int64_t i = 0; i < D; i++) {  // rounded twice, as in the definition
    from_float(to_float(row[i]) * scale, out + i);
    from_float(to_float(out[i]) * to_float(weight[i]), out + i);
  }
}

template <class T>
void run(const Call& call) {
  const Array rows = call.argument(0), weights = call.argument(1);
  const int64_t D = weights.dim(0), count = rows.size() / D;
  const int64_t size = std::max<int64_t>(1, SHARE / D), tasks = (count + size - 1) / size;
  auto work = [=, row = rows.data<T>(), weight = weights.data<T>(), eps = call.attribute<float>(0),
               out = call.result(0).data<T>()](int64_t task) {
    for (int64_t r = task * size; r < std::min(count, (task + 1) * size); r++) {
      normalize(row + r * D, weight, D, eps, out + r * D);
    }
  };
  run_tasks(call, tasks, true, std::move(work));
}

}  // namespace tsjax::norms

extern "C" XLA_FFI_Error* tsjax_rms_norm(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 2, .results = 1, .attributes = 1}, [](const Call& call) {
    call.argument(0).is<float>() ? norms::run<float>(call) : norms::run<bfloat16>(call);
  });
}
