// SPDX-License-Identifier: Apache-2.0
// Rows of a cache as they lie in memory: numbers of T, or of int8 with a power of two for each row
// (narrow_rows.py). These are widened block by block, to numbers that T holds exactly, so that
// whoever reads them computes the same bits as from a wide cache.
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

  // Where a row lies, to fetch it and those after it.
  Next from(int64_t row, int64_t H) const {
    if (is_narrow()) return {reinterpret_cast<const char*>(numbers + row * H), H};
    return {reinterpret_cast<const char*>(wide + row * H), static_cast<int64_t>(H * sizeof(T))};
  }
};

}  // namespace tsjax
