// SPDX-License-Identifier: Apache-2.0
// Rows of a cache as they lie in memory: numbers of T, or of int8 with a power of two for each row
// (narrow_rows.py). Whoever reads these computes the same bits as from a wide cache: the numbers are
// multiplied first and the powers after that, which no rounding between tells, as long as all remain
// normal floats. Blocks where that is not sure are widened, to numbers that T holds exactly.
#pragma once

#include "rows.h"

namespace tsjax {

constexpr int8_t NO_NUMBERS = -128;  // the exponent of a row that is NaN

inline float scale_of(int8_t exponent) {
  if (exponent == NO_NUMBERS) return NAN;
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// Where queries and powers of two are within these, no product with a number and no sum of such leaves
// the normal floats, with its power or without: the last of a query's 24 bits is 2^-73 or more, and
// 2^-113 is a normal float; 2^50 * 127 * 2^40 is far from infinity. Weights are not bound so: one that
// its power takes below the normal floats counts as zero, which is less than 2^-119 of any sum.
constexpr float MOST_OF_QUERY = 0x1p50f, LEAST_OF_QUERY = 0x1p-50f;  // or 0
constexpr int MOST_POWER = 40;

// Whether so many numbers of queries are, whole vectors of them.
template <class T>
bool are_moderate(const T* queries, int64_t count) {
  const Vector none = set(0.0f), least = set(LEAST_OF_QUERY), most = set(MOST_OF_QUERY);
  Vector beyond = none;
  for (int64_t i = 0; i < count; i += W) {
    const Vector x = load(queries + i), size = max(x, none - x);
    const Vector too_small = where_less(none, size, where_less(size, least, least, none), none);
    beyond = max(beyond, max(too_small, where_less(most, size, most, none)));
  }
  return largest(beyond) == 0.0f;
}

template <class T>
struct Stored {
  const T* wide;                       // nullptr if they are narrow
  const int8_t *numbers, *exponents;  // nullptr if they are wide

  Stored(const T* wide) : wide(wide), numbers(nullptr), exponents(nullptr) {}
  Stored(const int8_t* numbers, const int8_t* exponents)
      : wide(nullptr), numbers(numbers), exponents(exponents) {}

  bool is_narrow() const { return !wide; }

  // Narrow rows of H numbers, from `row` on, as floats or T of `width`, zeros after their ends.
  template <class Number>
  void widen(int64_t row, int64_t count, int64_t H, int64_t width, Number* to) const {
    const int64_t whole = H / W * W;
    for (const int64_t end = row + count; row < end; row++, to += width) {
      const int8_t* from = numbers + row * H;
      const float scale = scale_of(exponents[row]);
      for (int64_t i = 0; i < whole; i += W) store(to + i, load(from + i) * set(scale));
      for (int64_t i = whole; i < width; i++) {
        from_float(i < H ? to_float(from[i]) * scale : 0.0f, to + i);
      }
    }
  }

  // The powers of two of a block's rows from `row` on, times `scale`; whether all are moderate.
  bool powers(int64_t row, float scale, float* to) const {
    uint32_t beyond = 0;
    for (int i = 0; i < BLOCK; i++) {
      const int32_t exponent = exponents[row + i];
      beyond |= static_cast<uint32_t>(exponent + MOST_POWER) > 2 * MOST_POWER;
      const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
      float power;
      std::memcpy(&power, &bits, sizeof power);
      to[i] = power * scale;
    }
    return !beyond;
  }

  // Where a row lies, to fetch it and those after it.
  Next from(int64_t row, int64_t H) const {
    if (is_narrow()) return {reinterpret_cast<const char*>(numbers + row * H), H};
    return {reinterpret_cast<const char*>(wide + row * H), static_cast<int64_t>(H * sizeof(T))};
  }
};

}  // namespace tsjax
