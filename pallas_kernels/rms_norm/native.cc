// SPDX-License-Identifier: Apache-2.0
// Root mean square norms on a CPU. The sum of squares has W running parts as in product/native.cc,
// in the same order for any number of rows.

#include "../native/rows.h"
#include "../native/tasks.h"

namespace ffi = xla::ffi;

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
void run(ffi::ThreadPool& pool, ffi::AnyBuffer rows, ffi::AnyBuffer weight, float eps,
         ffi::Result<ffi::AnyBuffer> out) {
  const int64_t D = weight.dimensions()[0], count = static_cast<int64_t>(rows.element_count()) / D;
  const int64_t size = std::max<int64_t>(1, SHARE / D), tasks = (count + size - 1) / size;
  auto work = [=, rows = static_cast<const T*>(rows.untyped_data()),
               weight = static_cast<const T*>(weight.untyped_data()),
               out = static_cast<T*>(out->untyped_data())](int64_t task) {
    for (int64_t r = task * size; r < std::min(count, (task + 1) * size); r++) {
      normalize(rows + r * D, weight, D, eps, out + r * D);
    }
  };
  run_tasks(pool, tasks, true, std::move(work));
}

ffi::Error handle(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer weight,
                  ffi::Result<ffi::AnyBuffer> out, float eps) {
  bool is_float = rows.element_type() == ffi::DataType::F32;
  (is_float ? run<float> : run<bfloat16>)(pool, rows, weight, eps, out);
  return ffi::Error::Success();
}

}  // namespace tsjax::norms

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tsjax_rms_norm, tsjax::norms::handle,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // rows
        .Arg<ffi::AnyBuffer>()  // weight
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("eps"));
