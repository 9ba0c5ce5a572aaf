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

// Slots that are scored at a time.
constexpr int SLOTS = W > 8 ? W : 8;

// So many vectors beside each of R rows fill the registers: a sum for each row and vector, all of
// the rows' own or all of the others, and one more.
constexpr int most_vectors(int rows) {
  int vectors = 8;
  while (rows * vectors + std::min(rows, vectors) + 1 > REGISTERS) vectors--;
  return vectors;
}

// The same for a power of two, which divides SLOTS.
constexpr int most_slots(int rows) {
  int slots = 8;
  while (slots > most_vectors(rows)) slots /= 2;
  return slots;
}

// sums[r][c] += a(r) * b(c). The few of one side stay in registers, the others come one by one.
template <int R, int C, class A, class B>
inline void add_products(Vector (&sums)[R][C], A a, B b) {
  using Numbers = decltype(a(0));
  if constexpr (R <= C) {
    Numbers row[R];
    UNROLLED for (int r = 0; r < R; r++) row[r] = a(r), keep(row[r]);
    UNROLLED for (int c = 0; c < C; c++) {
      Numbers other = b(c);
      if (R > 1) keep(other);
      UNROLLED for (int r = 0; r < R; r++) sums[r][c] = fma(row[r], other, sums[r][c]);
    }
  } else {
    Numbers other[C];
    UNROLLED for (int c = 0; c < C; c++) other[c] = b(c), keep(other[c]);
    UNROLLED for (int r = 0; r < R; r++) {
      Numbers row = a(r);
      if (C > 1) keep(row);
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = fma(row, other[c], sums[r][c]);
    }
  }
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

// Memory that is wanted soon, in rows; it is fetched beside the work on as many others.
struct Next {
  const char* rows = nullptr;
  int64_t bytes = 0;  // of a row

  void fetch(int64_t row) const {
    if (!rows) return;
    for (int64_t i = 0; i < bytes; i += 64) prefetch(rows + row * bytes + i);
  }
  // So many of the cache's lines, counted from the first row.
  template <int COUNT>
  void fetch_lines(int64_t line) const {
    if (!rows) return;
    UNROLLED for (int i = 0; i < COUNT; i++) prefetch(rows + (line + i) * 64);
  }
};

// f(R), a constant of the compiler's, for `rows` of 1 to MOST.
template <int MOST, class F>
inline void for_number(int64_t rows, F f) {
  [&]<int... R>(std::integer_sequence<int, R...>) {
    ((rows == R + 1 ? f(std::integral_constant<int, R + 1>()) : void()), ...);
  }(std::make_integer_sequence<int, MOST>());
}

// Rows of a tile: as few tiles as can be, about equal.
inline int64_t tile_of(int64_t rows, int64_t most) {
  const int64_t tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// Rows [B, T] of which each batch row wants the first so many; nullptr: all.
struct Live {
  const int32_t* counts;
  int64_t T;

  bool has(int64_t row) const { return !counts || row % T < counts[row / T]; }
};

// H numbers take this many floats: whole vectors.
inline int64_t padded(int64_t H) { return (H + W - 1) / W * W; }

// Rows of numbers that lie `stride` apart as floats of `width`, zeros after their end.
template <class T>
void as_floats(const T* from, int64_t stride, int64_t rows, int64_t H, int64_t width, float* to) {
  const int64_t whole = H / W * W;
  for (int64_t s = 0; s < rows; s++, from += stride, to += width) {
    for (int64_t i = 0; i < whole; i += W) store(to + i, load(from + i));
    for (int64_t i = whole; i < width; i++) to[i] = i < H ? to_float(from[i]) : 0.0f;
  }
}

// scores[r * stride + slot] of query r and each key; `slots` is a multiple of SLOTS and `width` one
// of W. A score has W parts, part l sums entries l, l + W, ...; then they are added, halves first.
template <int R, class T>
void scores_of(const float* q, const T* keys, int64_t slots, int64_t width, float* scores,
               int64_t stride, Next next) {
  constexpr int C = most_slots(R);
  for (int64_t first = 0; first < slots; first += SLOTS) {
    Vector parts[R][SLOTS];
    for (int s = 0; s < SLOTS; s += C) {
      const T* some = keys + (first + s) * width;
      UNROLLED for (int c = 0; c < C; c++) next.fetch(first + s + c);
      Vector sums[R][C];
      UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) sums[r][c] = set(0.0f);
      for (int64_t i = 0; i < width; i += W) {
        add_products(sums, [&](int r) { return load(q + r * width + i); },
                     [&](int c) { return load(some + c * width + i); });
      }
      UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) parts[r][s + c] = sums[r][c];
    }
    for (int r = 0; r < R; r++)
      for (int s = 0; s < SLOTS; s += W) store(scores + r * stride + first + s, totals(parts[r] + s));
  }
}

#if defined(__AVX512F__)
// Where many rows read short keys, turning these takes less time than sums across vectors do; with
// vectors of 8 it does not.

// A block of keys turned: entry i of slot s at turned[i * BLOCK + s].
template <class T>
void turn_keys(const T* keys, int64_t width, float* turned, Next next) {
  for (int64_t s = 0; s < BLOCK; s += W) {
    UNROLLED for (int j = 0; j < W; j++) next.fetch(s + j);
    for (int64_t i = 0; i < width; i += W) {
      Vector rows[W], columns[W];
      UNROLLED for (int j = 0; j < W; j++) rows[j] = load(keys + (s + j) * width + i);
      turn(rows, columns);
      UNROLLED for (int j = 0; j < W; j++) store(turned + (i + j) * BLOCK + s, columns[j]);
    }
  }
}

// The sums of the parts l, l + N, ... of W scores of R rows, halves first: as totals() adds them.
template <int N, int R>
inline void add_parts(const float* q, const float* turned, int64_t width, int l, Vector (&sums)[R]) {
  if constexpr (N == W) {
    UNROLLED for (int r = 0; r < R; r++) sums[r] = set(0.0f);
    for (int64_t i = l; i < width; i += W) {
      Vector key = load(turned + i * BLOCK);
      UNROLLED for (int r = 0; r < R; r++) sums[r] = fma(set(q[r * width + i]), key, sums[r]);
    }
  } else {
    Vector others[R];
    add_parts<2 * N>(q, turned, width, l, sums);
    add_parts<2 * N>(q, turned, width, l + N, others);
    UNROLLED for (int r = 0; r < R; r++) sums[r] = sums[r] + others[r];
  }
}

// As scores_of, of a block whose keys were turned: the same bits, without sums across vectors.
template <int R>
void turned_scores_of(const float* q, const float* turned, int64_t width, float* scores) {
  for (int64_t s = 0; s < BLOCK; s += W) {
    Vector sums[R];
    add_parts<1>(q, turned + s, width, 0, sums);
    UNROLLED for (int r = 0; r < R; r++) store(scores + r * BLOCK + s, sums[r]);
  }
}

inline void turned_scores(int64_t rows, const float* q, const float* turned, int64_t width,
                          float* scores) {
  constexpr int TILE = 3;  // rows that have their sums in registers, one for each level of the tree
  int64_t r = 0;
  for (; r + TILE <= rows; r += TILE) {
    turned_scores_of<TILE>(q + r * width, turned, width, scores + r * BLOCK);
  }
  for (; r < rows; r++) turned_scores_of<1>(q + r * width, turned, width, scores + r * BLOCK);
}
#endif

// Scores [rows, BLOCK] of keys whose powers of two were left out.
inline void times_powers(float* scores, int64_t rows, const float* powers) {
  for (int64_t r = 0; r < rows; r++, scores += BLOCK) {
    for (int s = 0; s < BLOCK; s += W) store(scores + s, load(scores + s) * load(powers + s));
  }
}

// out[r * width + i] += weights[r * stride + slot] * values[slot * width + i], slot by slot, for i
// below `width`, a multiple of W.
template <int R, class T>
void add_values_of(const float* weights, int64_t stride, const T* values, int64_t slots, float* out,
                   int64_t width, Next next) {
  for_pieces<most_vectors(R)>(width / W, [&](auto piece, int64_t first) {
    constexpr int C = piece;
    const T* from = values + first * W;
    float* to = out + first * W;
    const Next wanted = first ? Next() : next;
    Vector sums[R][C];
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = load(to + r * width + c * W);
    for (int64_t s = 0; s < slots; s++) {
      wanted.fetch(s);
      add_products(sums, [&](int r) { return set(weights[r * stride + s]); },
                   [&](int c) { return load(from + s * width + c * W); });
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) store(to + r * width + c * W, sums[r][c]);
  });
}

// The same for a number of rows that is known when they run, up to MOST_ROWS.
template <class... Arguments>
void score_rows(int64_t rows, Arguments... arguments) {
  switch (rows) {
    case 1: return scores_of<1>(arguments...);
    case 2: return scores_of<2>(arguments...);
    case 3: return scores_of<3>(arguments...);
    case 4: return scores_of<4>(arguments...);
    case 5: return scores_of<5>(arguments...);
    case 6: return scores_of<6>(arguments...);
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
