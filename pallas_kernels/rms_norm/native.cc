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

// x + update, in x's type.
template <class T, class Update>
void add(const T* row, const Update* update, int64_t D, T* out) {
  for (int64_t i = 0; i < D; i++) {
    from_float(to_float(row[i]) + rounded<T>(update[i]), out + i);
  }
}

// of_row(r) for each row that is wanted by the operand `live`; of the others zeros in the results.
template <class T, class OfRow>
void each_row(const Call& call, int64_t live, int64_t results, int64_t D, OfRow of_row) {
  const Array rows = call.argument(0);
  const Live wanted = live_of(call.argument(live), rows);
  const int64_t count = rows.size() / D, size = std::max<int64_t>(1, SHARE / D);
  auto work = [=, &call](int64_t task) {
    for (int64_t r = task * size; r < std::min(count, (task + 1) * size); r++) {
      if (wanted.has(r)) {
        of_row(r * D);
      } else {
        for (int64_t i = 0; i < results; i++) std::fill_n(call.result(i).data<T>() + r * D, D, T{});
      }
    }
  };
  run_tasks(call, (count + size - 1) / size, true, std::move(work));
}

template <class T>
void run(const Call& call) {
  const Array weights = call.argument(1);
  const int64_t D = weights.dim(0);
  auto of_row = [=, eps = call.attribute<float>(0), rows = call.argument(0).data<T>(),
                 weight = weights.data<T>(), out = call.result(0).data<T>()](int64_t at) {
    normalize(rows + at, weight, D, eps, out + at);
  };
  each_row<T>(call, 2, 1, D, of_row);
}

template <class T, class Update>
void run_adding(const Call& call) {
  const Array weights = call.argument(2);
  const int64_t D = weights.dim(0);
  auto of_row = [=, eps = call.attribute<float>(0), rows = call.argument(0).data<T>(),
                 update = call.argument(1).data<Update>(), weight = weights.data<T>(),
                 sums = call.result(0).data<T>(), out = call.result(1).data<T>()](int64_t at) {
    add(rows + at, update + at, D, sums + at);
    normalize(sums + at, weight, D, eps, out + at);
  };
  each_row<T>(call, 3, 2, D, of_row);
}

}  // namespace tsjax::norms

// Rows, weight, live; their norms.
extern "C" XLA_FFI_Error* tsjax_rms_norm(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 3, .results = 1, .attributes = 1}, [](const Call& call) {
    call.argument(0).is<float>() ? norms::run<float>(call) : norms::run<bfloat16>(call);
  });
}

// Rows, update, weight, live; their sums and the norms of these.
extern "C" XLA_FFI_Error* tsjax_add_rms_norm(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 4, .results = 2, .attributes = 1}, [](const Call& call) {
    if (call.argument(0).is<float>()) {
      norms::run_adding<float, float>(call);
    } else if (call.argument(1).is<float>()) {
      norms::run_adding<bfloat16, float>(call);
    } else {
      norms::run_adding<bfloat16, bfloat16>(call);
    }
  });
}
