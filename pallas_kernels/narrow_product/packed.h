// SPDX-License-Identifier: Apache-2.0
// Rows as narrow weights are multiplied with them: those of bfloat16 as integers, others as floats.
#pragma once

#include <algorithm>

#include "words.h"

namespace tsjax::narrow {

constexpr int64_t MOST = REGISTERS == 32 ? 12 : 6;  // vectors of sums, beside as many of a group
constexpr int HALF = 16;           // entries of half a group, or of a small one
constexpr int ENTRIES = 32;        // that are rounded together, as in reference.py
constexpr float TINY = 0x1p-100f;  // if they are below it they are multiplied as zeros

union Word {
  int32_t integer;  // or four bytes
  float number;
};

// Rows of a tile as they are multiplied: of each group its words, each for all R rows.
template <class T>
struct Packed;

template <>
struct Packed<bfloat16> {
  using Sums = Words;
  static constexpr int64_t MOST_ROWS = MOST;

  // Words with four bytes each; then what the sum begins with, the scale of the entries, and this
  // times the sum of the integers.
  static constexpr int64_t words(int64_t entries) { return entries / 4; }
  static constexpr int64_t MORE = 3;

  static void take(const float* entries, int64_t group, int32_t zero, int64_t R, Word* to) {
    Vector most = set(0.0f), bad = set(0.0f);
    for (int i = 0; i < ENTRIES; i += W) {
      const Vector some = load(entries + i);
      most = max(most, max(some, set(0.0f) - some));
      bad = fma(some, set(0.0f), bad);  // NaN if one is not finite
    }
    const float spoilt = tsjax::sum(bad), large = largest(most);
    const Vector step = set(large > TINY && spoilt == 0.0f ? 127.0f / large : 0.0f);
    float whole[ENTRIES];
    int8_t integers[ENTRIES];
    for (int i = 0; i < ENTRIES; i += W) store(whole + i, round(load(entries + i) * step));
    for (int i = 0; i < ENTRIES; i++) integers[i] = spoilt == 0.0f ? whole[i] : 0.0f;
    const float scale = large / 127.0f + spoilt;
    for (int first = 0; first < ENTRIES; first += group) {
      int32_t total = 0;
      for (int i = first; i < first + group; i++) total += integers[i];
      for (int i = first; i < first + group; i += 4, to += R) std::memcpy(to, integers + i, 4);
      to[0].integer = -zero * total;
      to[R].number = scale;
      to[2 * R].number = scale * total;
      to += MORE * R;
    }
  }

  // Of what comes after the words of a row's group.
  static Sums first(const Word* after) { return set(after->integer); }
  static Vector scaled(Sums sums, Vector scale, const Word* after, int64_t R, Vector total) {
    return fma(to_floats(sums), scale * set(after[R].number), total);
  }
  static float sum(const Word* after, int64_t R) { return after[2 * R].number; }

  template <int BITS, int R, int V>
  static void add(Words bytes, const Word* row, int four, int32_t, int v, Sums (&sums)[V][R]) {
    UNROLLED for (int r = 0; r < R; r++) {
      sums[v][r] = add_dots<BITS>(bytes, set(row[four * R + r].integer), sums[v][r]);
    }
  }
};

template <>
struct Packed<float> {
  using Sums = Vector;
  static constexpr int64_t MOST_ROWS = MOST / 2;

  // The entries; then their sum.
  static constexpr int64_t words(int64_t entries) { return entries; }
  static constexpr int64_t MORE = 1;

  static void take(const float* entries, int64_t group, int32_t, int64_t R, Word* to) {
    for (int first = 0; first < ENTRIES; first += group, to += R) {
      float total = 0.0f;
      for (int i = first; i < first + group; i++, to += R) total += to->number = entries[i];
      to->number = total;
    }
  }

  static Sums first(const Word*) { return set(0.0f); }
  static Vector scaled(Sums sums, Vector scale, const Word*, int64_t, Vector total) {
    return fma(sums, scale, total);
  }
  static float sum(const Word* after, int64_t) { return after->number; }

  template <int BITS, int R, int V>
  static void add(Words bytes, const Word* row, int four, int32_t zero, int v, Sums (&sums)[V][R]) {
    auto add_one = [&](Words integers, int i) {
      const Vector weight = to_floats(integers) - set(static_cast<float>(zero));
      UNROLLED for (int r = 0; r < R; r++) {
        sums[v][r] = fma(weight, set(row[(4 * four + i) * R + r].number), sums[v][r]);
      }
    };
    add_one(byte_of<0>(bytes), 0);
    add_one(byte_of<1>(bytes), 1);
    add_one(byte_of<2>(bytes), 2);
    add_one(byte_of<3>(bytes), 3);
  }
};

}  // namespace tsjax::narrow
