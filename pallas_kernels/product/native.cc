// SPDX-License-Identifier: Apache-2.0
// Products of rows with weights on a CPU: each weight is read once, for all rows.
//
// A sum over the inner dimension has W running parts, which take their entries as Multiplied (in
// native/simd.h) says for the rows' type; in the end the parts are added, halves first. That order is
// the same for one row and for a thousand. Of rows that are not live there are no sums, but zeros.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::product {

constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications
constexpr int64_t NEAR = 1 << 16;           // weights of a block, which stays near the core
constexpr int64_t AHEAD = 4096;             // bytes from what is read to what is fetched
constexpr int64_t MOST = REGISTERS == 32 ? 12 : 6;  // rows of a tile: sums beside two outputs

template <class T>
struct Arrays {
  const T* rows;
  float* out;
  int64_t R, O, I;
  Live live;
};

template <class T>
using Number = typename Multiplied<T>::Number;

// The numbers that I entries take: whole steps.
template <class T>
int64_t packed_size(int64_t I) {
  constexpr int STEP = Multiplied<T>::STEP;
  return (I + STEP - 1) / STEP * STEP;
}

// Rows side by side, step by step, zeros after the end: entry i of the r-th of R places is at
// to[(i / STEP * R + r) * STEP + i % STEP].
template <class T>
void pack_rows(const T* rows, const int64_t* places, int64_t R, int64_t I, Number<T>* to) {
  constexpr int STEP = Multiplied<T>::STEP;
  for (int64_t r = 0; r < R; r++) {
    const T* row = rows + places[r] * I;
    int64_t i = 0;
    for (; i + STEP <= I; i += STEP) {
      Multiplied<T>::store(to + i * R + r * STEP, Multiplied<T>::load(row + i));
    }
    for (; i < packed_size<T>(I); i++) {
      from_float(i < I ? to_float(row[i]) : 0.0f, to + i / STEP * STEP * R + r * STEP + i % STEP);
    }
  }
}

// out[places[r] * stride + o * apart] of R rows that are packed and O outputs. Their weights lie
// `apart` in memory: a core reads a few long streams faster than many short ones. Those that are `far` are
// fetched ahead, or several rows would wait for them; for one or two they come by themselves.
template <class T, int R, int O, bool far, class Weight>
void dot(const Number<T>* packed, const Weight* weights, int64_t apart, int64_t I,
         const float* scales, float* out, const int64_t* places, int64_t stride) {
  using M = Multiplied<T>;
  Vector sums[R][O];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int o = 0; o < O; o++) sums[r][o] = set(0.0f);
  int64_t i = 0;
  auto entry = [&](int r) { return M::load(packed + i * R + r * M::STEP); };
  for (; i + M::STEP <= I; i += M::STEP) {
    add_products(sums, entry, [&](int o) {
      const Weight* from = weights + o * apart * I + i;
      if (far) prefetch(from + AHEAD / sizeof(Weight));
      return M::load(from);
    });
  }
  if (i < I) {  // the same with zeros after the end
    add_products(sums, entry, [&](int o) {
      Weight entries[M::STEP] = {};
      for (int j = 0; i + j < I; j++) entries[j] = weights[o * apart * I + i + j];
      return M::load(entries);
    });
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int o = 0; o < O; o++) {
      float total = sum(sums[r][o]);
      out[places[r] * stride + o * apart] = scales ? total * scales[o * apart] : total;
    }
}

template <class T, int R, class Weight>
void dot_rows(const Number<T>* packed, const Weight* weights, int64_t outputs, int64_t I,
              const float* scales, float* out, const int64_t* places, int64_t stride, bool far) {
  constexpr int O = std::min(4, most_vectors(R));
  const int64_t apart = outputs / O;
  auto of = [&](int64_t o) { return scales ? scales + o : nullptr; };
  for (int64_t o = 0; o < apart; o++) {
    if (far && R > 2) {
      dot<T, R, O, true>(packed, weights + o * I, apart, I, of(o), out + o, places, stride);
    } else {
      dot<T, R, O, false>(packed, weights + o * I, apart, I, of(o), out + o, places, stride);
    }
  }
  for (int64_t o = apart * O; o < outputs; o++) {
    dot<T, R, 1, false>(packed, weights + o * I, 0, I, of(o), out + o, places, stride);
  }
}

// All rows with some outputs; rows are packed in tiles.
template <class T, class Weight>
void dot_all(const Number<T>* packed, const Weight* weights, const int64_t* places, int64_t rows,
             int64_t outputs, int64_t I, const float* scales, float* out, int64_t stride) {
  const int64_t tile = tile_of(rows, MOST);
  for (int64_t r = 0; r < rows; r += tile) {
    for_number<MOST>(std::min(tile, rows - r), [&](auto R) {
      dot_rows<T, R>(packed + r * packed_size<T>(I), weights, outputs, I, scales, out, places + r,
                     stride, r == 0);
    });
  }
}

template <class T, class Weight, class Pool>
void multiply(Pool& pool, const Arrays<T>& arrays, const Weight* weights,
              const float* scales) {
  const int64_t O = arrays.O, I = arrays.I;
  // This thread's until the last task is done, as are the packed rows.
  int64_t* places = scratch<2, int64_t>(arrays.R);
  int64_t R = 0;
  for (int64_t r = 0; r < arrays.R; r++)
    if (arrays.live.has(r)) places[R++] = r;
  const int64_t tile = R ? tile_of(R, MOST) : 1;
  Number<T>* packed = scratch<1, Number<T>>(R * packed_size<T>(I));
  for (int64_t r = 0; r < R; r += tile) {
    pack_rows(arrays.rows, places + r, std::min(tile, R - r), I, packed + r * packed_size<T>(I));
  }
  // Blocks of outputs, so that rows after the first find their weights near.
  const int64_t block = std::max<int64_t>(8, NEAR / I / 8 * 8);
  const int64_t share = (O + 4 * pool.num_threads() - 1) / (4 * pool.num_threads());
  const int64_t size = std::min(block, std::max<int64_t>(8, (share + 7) / 8 * 8));
  const int64_t tasks = (O + size - 1) / size;
  auto work = [=](int64_t task) {
    const int64_t first = task * size, outputs = std::min(size, O - first);
    float* out = arrays.out + first;
    for (int64_t r = 0; R < arrays.R && r < arrays.R; r++)
      if (!arrays.live.has(r)) std::fill_n(out + r * O, outputs, 0.0f);
    if (!R) return;
    const Weight* some = weights + first * I;
    const float* of_some = scales ? scales + first : nullptr;
    dot_all<T>(packed, some, places, R, outputs, I, of_some, out, O);
  };
  run_tasks(pool, tasks, R * O * I > WORTH_SHARING, std::move(work));
}

template <class T>
void run(const Call& call) {
  const Array rows = call.argument(0), weights = call.argument(1);
  const int64_t O = weights.dim(0), I = weights.dim(1);
  const Live live = live_of(call.argument(3), rows);
  Arrays<T> arrays{rows.data<T>(), call.result(0).data<float>(), rows.size() / I, O, I, live};
  const float* scales = call.argument(2).data<float>();
  if (weights.is<int8_t>()) {
    multiply(call, arrays, weights.data<int8_t>(), scales);
  } else {
    multiply(call, arrays, weights.data<T>(), scales);
  }
}

}  // namespace tsjax::product

// Rows, weights, scales, live; their products.
extern "C" XLA_FFI_Error* tsjax_product(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 4, .results = 1}, [](const Call& call) {
    call.argument(0).is<float>() ? product::run<float>(call) : product::run<bfloat16>(call);
  });
}
