// SPDX-License-Identifier: Apache-2.0
// Rows of queries against blocks of slots: the inner loops of attention and of its scores.
//
// Rows run in tiles of up to MOST_ROWS. What a row computes does not depend on its tile.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace tsjax {

constexpr int BLOCK = 64;  // slots
constexpr int64_t MOST_ROWS = 6;
constexpr float ABSENT = -INFINITY;  // the score of a slot that a row does not see

// So many vectors beside each of R rows fill the registers: a sum for each row, and the vectors.
constexpr int most_vectors(int rows) {
  return rows == 1 ? 8 : std::min(8, (REGISTERS - 1) / (rows + 1));
}

// f(C, first) for pieces of C vectors, a constant of the compiler's, about equal and at most MOST.
template <int MOST, class F>
inline void for_pieces(int64_t vectors, F f) {
  int64_t pieces = (vectors + MOST - 1) / MOST;
  for (int64_t i = 0; i < pieces; i++) {
    int64_t first = i * vectors / pieces, size = (i + 1) * vectors / pieces - first;
    [&]<int... C>(std::integer_sequence<int, C...>) {
      ((size == C + 1 ? f(std::integral_constant<int, C + 1>(), first) : void()), ...);
    }(std::make_integer_sequence<int, MOST>());
  }
}

// to[h * BLOCK + slot] for `slots` keys that lie `stride` apart; the slots beyond them are zero.
// What lies at `next`, as much as the keys, is fetched meanwhile.
template <class T>
inline void pack_keys(const T* keys, int64_t stride, int64_t H, int64_t slots, float* to,
                      const T* next = nullptr) {
  constexpr int64_t LINE = 64 / sizeof(T);
  int64_t whole = slots / 8 * 8;
  for (int64_t s = 0; s < whole; s += 8) {
    for (int64_t h = 0; h < H; h += 8) {
      if (next) {
        UNROLLED for (int64_t i = 0; i < 64; i += LINE) prefetch(next + s * H + h * 8 + i);
      }
      transpose(keys + s * stride + h, stride, to + h * BLOCK + s, BLOCK);
    }
  }
  for (int64_t h = 0; h < H && whole < BLOCK; h++) {
    for (int64_t s = whole; s < BLOCK; s++) {
      to[h * BLOCK + s] = s < slots ? to_float(keys[s * stride + h]) : 0.0f;
    }
  }
}

// scores[r * stride + slot]: each the sum over h, in that order.
template <int R>
void products_of(const float* q, int64_t H, const float* keys, float* scores, int64_t stride) {
  for_pieces<most_vectors(R)>(BLOCK / W, [&](auto piece, int64_t first) {
    constexpr int C = piece;
    Vector sums[R][C];
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = set(0.0f);
    for (int64_t h = 0; h < H; h++) {
      Vector key[C];
      UNROLLED for (int c = 0; c < C; c++) key[c] = load(keys + h * BLOCK + (first + c) * W);
      UNROLLED for (int r = 0; r < R; r++) {
        Vector x = set(q[r * H + h]);
        UNROLLED for (int c = 0; c < C; c++) sums[r][c] = fma(x, key[c], sums[r][c]);
      }
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) store(scores + r * stride + (first + c) * W, sums[r][c]);
  });
}

// out[r * out_stride + i] += weights[r * stride + slot] * values[slot * width + i], slot by slot,
// for i below `width`, a multiple of W.
template <int R>
void add_values_of(const float* weights, int64_t stride, const float* values, int64_t slots,
                   float* out, int64_t width) {
  for_pieces<most_vectors(R)>(width / W, [&](auto piece, int64_t first) {
    constexpr int C = piece;
    const float* from = values + first * W;
    float* to = out + first * W;
    Vector sums[R][C];
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = load(to + r * width + c * W);
    for (int64_t s = 0; s < slots; s++) {
      Vector value[C];
      UNROLLED for (int c = 0; c < C; c++) value[c] = load(from + s * width + c * W);
      UNROLLED for (int r = 0; r < R; r++) {
        Vector weight = set(weights[r * stride + s]);
        UNROLLED for (int c = 0; c < C; c++) sums[r][c] = fma(weight, value[c], sums[r][c]);
      }
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) store(to + r * width + c * W, sums[r][c]);
  });
}

// The same for a number of rows that is known when they run, up to MOST_ROWS.
template <class... Arguments>
void products(int64_t rows, Arguments... arguments) {
  switch (rows) {
    case 1: return products_of<1>(arguments...);
    case 2: return products_of<2>(arguments...);
    case 3: return products_of<3>(arguments...);
    case 4: return products_of<4>(arguments...);
    case 5: return products_of<5>(arguments...);
    case 6: return products_of<6>(arguments...);
  }
}

template <class... Arguments>
void add_values(int64_t rows, Arguments... arguments) {
  switch (rows) {
    case 1: return add_values_of<1>(arguments...);
    case 2: return add_values_of<2>(arguments...);
    case 3: return add_values_of<3>(arguments...);
    case 4: return add_values_of<4>(arguments...);
    case 5: return add_values_of<5>(arguments...);
    case 6: return add_values_of<6>(arguments...);
  }
}

}  // namespace tsjax
