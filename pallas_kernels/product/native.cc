// SPDX-License-Identifier: Apache-2.0
// Products of rows with weights on a CPU: each weight is read once, for all rows.
//
// A sum over the inner dimension has W running parts, part l for entries l, l + W, l + 2W, ...; in
// the end the parts are added, halves first. That order is the same for one row and for a thousand.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::product {

constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications
constexpr int64_t NEAR = 1 << 16;           // weights of a block, which stays near the core
constexpr int64_t AHEAD = 4096;             // bytes from what is read to what is fetched

template <class T>
struct Arrays {
  const T* rows;
  float* out;
  int64_t R, O, I;
};

// Rows side by side: to[(i / W * R + r) * W + i % W] is entry i of row r, zeros after the end.
template <class T>
void pack_rows(const T* rows, int64_t R, int64_t I, float* to) {
  for (int64_t r = 0; r < R; r++) {
    const T* row = rows + r * I;
    int64_t i = 0;
    for (; i + W <= I; i += W) store(to + i * R + r * W, load(row + i));
    for (; i < padded(I); i++) to[i / W * W * R + r * W + i % W] = i < I ? to_float(row[i]) : 0.0f;
  }
}

// out[r * stride + o * apart] of R rows that are packed and O outputs. Their weights lie `apart` in
// memory: a core reads a few long streams faster than many short ones. Those that are `far` are
// fetched ahead, or several rows would wait for them; for one or two they come by themselves.
template <int R, int O, bool far, class Weight>
void dot(const float* packed, const Weight* weights, int64_t apart, int64_t I, const float* scales,
         float* out, int64_t stride) {
  Vector sums[R][O];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int o = 0; o < O; o++) sums[r][o] = set(0.0f);
  int64_t i = 0;
  auto entry = [&](int r) { return load(packed + i * R + r * W); };
  for (; i + W <= I; i += W) {
    add_products(sums, entry, [&](int o) {
      const Weight* from = weights + o * apart * I + i;
      if (far) prefetch(from + AHEAD / sizeof(Weight));
      return load(from);
    });
  }
  if (i < I) {  // the same with zeros after the end
    add_products(sums, entry, [&](int o) {
      float entries[W] = {};
      for (int j = 0; j < W && i + j < I; j++) entries[j] = to_float(weights[o * apart * I + i + j]);
      return load(entries);
    });
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int o = 0; o < O; o++) {
      float total = sum(sums[r][o]);
      out[r * stride + o * apart] = scales ? total * scales[o * apart] : total;
    }
}

template <int R, class Weight>
void dot_rows(const float* packed, const Weight* weights, int64_t outputs, int64_t I,
              const float* scales, float* out, int64_t stride, bool far) {
  constexpr int O = std::min(4, most_vectors(R));
  const int64_t apart = outputs / O;
  auto of = [&](int64_t o) { return scales ? scales + o : nullptr; };
  for (int64_t o = 0; o < apart; o++) {
    if (far && R > 2) {
      dot<R, O, true>(packed, weights + o * I, apart, I, of(o), out + o, stride);
    } else {
      dot<R, O, false>(packed, weights + o * I, apart, I, of(o), out + o, stride);
    }
  }
  for (int64_t o = apart * O; o < outputs; o++) {
    dot<R, 1, false>(packed, weights + o * I, 0, I, of(o), out + o, stride);
  }
}

// All rows with some outputs; rows are packed in tiles of MOST_ROWS.
template <class Weight>
void dot_all(const float* packed, const Weight* weights, int64_t rows, int64_t outputs, int64_t I,
             const float* scales, float* out, int64_t stride) {
  for (int64_t r = 0, R; r < rows; r += R) {
    R = std::min(MOST_ROWS, rows - r);
    const float* tile = packed + r * padded(I);
    float* to = out + r * stride;
    const bool far = r == 0;
    switch (R) {
      case 1: dot_rows<1>(tile, weights, outputs, I, scales, to, stride, far); break;
      case 2: dot_rows<2>(tile, weights, outputs, I, scales, to, stride, far); break;
      case 3: dot_rows<3>(tile, weights, outputs, I, scales, to, stride, far); break;
      case 4: dot_rows<4>(tile, weights, outputs, I, scales, to, stride, far); break;
      case 5: dot_rows<5>(tile, weights, outputs, I, scales, to, stride, far); break;
      case 6: dot_rows<6>(tile, weights, outputs, I, scales, to, stride, far); break;
    }
  }
}

template <class T, class Weight, class Pool>
void multiply(Pool& pool, const Arrays<T>& arrays, const Weight* weights,
              const float* scales) {
  const int64_t R = arrays.R, O = arrays.O, I = arrays.I;
  float* packed = scratch<1>(R * padded(I));  // this thread's until the last task is done
  for (int64_t r = 0; r < R; r += MOST_ROWS) {
    pack_rows(arrays.rows + r * I, std::min(MOST_ROWS, R - r), I, packed + r * padded(I));
  }
  // Blocks of outputs, so that rows after the first find their weights near.
  const int64_t block = std::max<int64_t>(8, NEAR / I / 8 * 8);
  const int64_t share = (O + 4 * pool.num_threads() - 1) / (4 * pool.num_threads());
  const int64_t size = std::min(block, std::max<int64_t>(8, (share + 7) / 8 * 8));
  const int64_t tasks = (O + size - 1) / size;
  auto work = [=, out = arrays.out](int64_t task) {
    const int64_t first = task * size, outputs = std::min(size, O - first);
    const Weight* some = weights + first * I;
    const float* of_some = scales ? scales + first : nullptr;
    if constexpr (!std::is_same_v<Weight, float>) {
      if (R > MOST_ROWS) {
        float* floats = scratch<0>(outputs * I);
        for (int64_t i = 0; i < outputs * I; i++) floats[i] = to_float(some[i]);
        return dot_all(packed, floats, R, outputs, I, of_some, out + first, O);
      }
    }
    dot_all(packed, some, R, outputs, I, of_some, out + first, O);
  };
  run_tasks(pool, tasks, R * O * I > WORTH_SHARING, std::move(work));
}

template <class T>
void run(const Call& call) {
  const Array rows = call.argument(0), weights = call.argument(1);
  const int64_t O = weights.dim(0), I = weights.dim(1);
  Arrays<T> arrays{rows.data<T>(), call.result(0).data<float>(), rows.size() / I, O, I};
  const float* scales = call.argument(2).data<float>();
  if (weights.is<int8_t>()) {
    multiply(call, arrays, weights.data<int8_t>(), scales);
  } else {
    multiply(call, arrays, weights.data<T>(), scales);
  }
}

}  // namespace tsjax::product

// Rows, weights, scales; their products.
extern "C" XLA_FFI_Error* tsjax_product(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 3, .results = 1}, [](const Call& call) {
    call.argument(0).is<float>() ? product::run<float>(call) : product::run<bfloat16>(call);
  });
}
