// SPDX-License-Identifier: Apache-2.0
// The numbers of blocks as GGUF files store them: a few bits each, and scales that several share.
//
// Each number is made by the sums and products of the format's definition, in float32 and in its
// order, so that all who follow it have the same bits.

#include <cstdint>
#include <cstring>

namespace tsjax::stored {

inline float half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = bits >> 10 & 31;
  const uint32_t digits = bits & 0x3ff;
  uint32_t wide;
  if (exponent == 0) {  // digits * 2^-24, exactly
    const float small = static_cast<float>(digits) * 0x1p-24f;
    std::memcpy(&wide, &small, sizeof wide);
  } else {
    wide = (exponent == 31 ? 255 : exponent + 112) << 23 | digits << 13;
  }
  wide |= sign;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Blocks of 32 numbers: a scale, for some a number to add, for some a fifth bit of each, and four bits
// of two numbers in a byte: those of the first half are the lower ones.
template <bool WITH_LEAST, bool WITH_FIFTH>
struct Fours {
  static constexpr int NUMBERS = 32, FIFTH = WITH_LEAST ? 4 : 2, REST = FIFTH + (WITH_FIFTH ? 4 : 0);
  static constexpr int BYTES = REST + 16;

  static void widen(const uint8_t* block, float* out) {
    const float scale = half(block), least = WITH_LEAST ? half(block + 2) : 0.0f;
    uint32_t fifth = 0;
    if (WITH_FIFTH) std::memcpy(&fifth, block + FIFTH, sizeof fifth);
    constexpr int MIDDLE = WITH_LEAST ? 0 : WITH_FIFTH ? 16 : 8;
    auto number = [&](int bits) {
      const float x = static_cast<float>(bits - MIDDLE) * scale;
      return WITH_LEAST ? x + least : x;
    };
    for (int i = 0; i < 16; i++) {
      const int both = block[REST + i];
      const int low = fifth >> i & 1, high = fifth >> (i + 16) & 1;
      out[i] = number((both & 15) | low << 4);
      out[i + 16] = number(both >> 4 | high << 4);
    }
  }
};

struct Eights {  // a scale, and a byte for each of 32 numbers
  static constexpr int NUMBERS = 32, BYTES = 34;

  static void widen(const uint8_t* block, float* out) {
    const float scale = half(block);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
  }
};

// Blocks of 256 numbers, in parts of 16 or 32 that have scales of their own, of a few bits.

struct Q2K {
  static constexpr int NUMBERS = 256, BYTES = 16 + 64 + 4;

  static void widen(const uint8_t* block, float* out) {
    const uint8_t *scales = block, *bits = block + 16;
    const float scale = half(block + 80), least = half(block + 82);
    for (int part = 0; part < 16; part++) {
      const float of_part = scale * static_cast<float>(scales[part] & 15);
      const float less = least * static_cast<float>(scales[part] >> 4);
      const uint8_t* from = bits + part / 8 * 32 + part % 2 * 16;
      const int shift = part % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) {
        out[part * 16 + i] = of_part * static_cast<float>(from[i] >> shift & 3) - less;
      }
    }
  }
};

struct Q3K {
  static constexpr int NUMBERS = 256, BYTES = 32 + 64 + 12 + 2;

  static void widen(const uint8_t* block, float* out) {
    const uint8_t *third = block, *bits = block + 32, *scales = block + 96;
    const float scale = half(block + 108);
    for (int part = 0; part < 16; part++) {
      const int low = scales[part % 8] >> part / 8 * 4 & 15;
      const int high = scales[8 + part % 4] >> part / 4 * 2 & 3;
      const float of_part = scale * static_cast<float>((low | high << 4) - 32);
      const uint8_t* from = bits + part / 8 * 32 + part % 2 * 16;
      const int shift = part % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) {
        const int bit = third[part % 2 * 16 + i] >> part / 2 & 1;
        out[part * 16 + i] = of_part * static_cast<float>((from[i] >> shift & 3) - (bit ? 0 : 4));
      }
    }
  }
};

template <bool WITH_FIFTH>
struct Q45K {  // Q4_K and Q5_K
  static constexpr int NUMBERS = 256, REST = WITH_FIFTH ? 48 : 16, BYTES = REST + 128;

  static void widen(const uint8_t* block, float* out) {
    const float scale = half(block), least = half(block + 2);
    const uint8_t *six = block + 4, *fifth = block + 16, *bits = block + REST;
    for (int part = 0; part < 8; part++) {
      int of_scale, of_least;
      if (part < 4) {
        of_scale = six[part] & 63, of_least = six[part + 4] & 63;
      } else {
        of_scale = (six[part + 4] & 15) | (six[part - 4] >> 6) << 4;
        of_least = six[part + 4] >> 4 | (six[part] >> 6) << 4;
      }
      const float of_part = scale * static_cast<float>(of_scale);
      const float less = least * static_cast<float>(of_least);
      const uint8_t* from = bits + part / 2 * 32;
      const int shift = part % 2 * 4;
      for (int i = 0; i < 32; i++) {
        const int high = WITH_FIFTH ? (fifth[i] >> part & 1) << 4 : 0;
        out[part * 32 + i] = of_part * static_cast<float>((from[i] >> shift & 15) | high) - less;
      }
    }
  }
};

struct Q6K {
  static constexpr int NUMBERS = 256, BYTES = 128 + 64 + 16 + 2;

  static void widen(const uint8_t* block, float* out) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    const float scale = half(block + 208);
    for (int part = 0; part < 16; part++) {
      const float of_part = scale * static_cast<float>(static_cast<int8_t>(scales[part]));
      const int eighth = part / 2;  // 32 numbers
      const uint8_t* lower = low + eighth / 4 * 64 + eighth % 2 * 32 + part % 2 * 16;
      const uint8_t* upper = high + eighth / 4 * 32 + part % 2 * 16;
      const int low_shift = eighth % 4 / 2 * 4, high_shift = eighth % 4 * 2;
      for (int i = 0; i < 16; i++) {
        const int bits = (lower[i] >> low_shift & 15) | (upper[i] >> high_shift & 3) << 4;
        out[part * 16 + i] = of_part * static_cast<float>(bits - 32);
      }
    }
  }
};

template <class Block>
void widen_all(const uint8_t* blocks, int64_t count, float* out) {
  for (int64_t b = 0; b < count; b++) {
    Block::widen(blocks + b * Block::BYTES, out + b * Block::NUMBERS);
  }
}

inline bool widen_kind(int64_t kind, const uint8_t* blocks, int64_t count, float* out) {
  switch (kind) {  // the numbers of the types in files
    case 2: widen_all<Fours<false, false>>(blocks, count, out); return true;
    case 3: widen_all<Fours<true, false>>(blocks, count, out); return true;
    case 6: widen_all<Fours<false, true>>(blocks, count, out); return true;
    case 7: widen_all<Fours<true, true>>(blocks, count, out); return true;
    case 8: widen_all<Eights>(blocks, count, out); return true;
    case 10: widen_all<Q2K>(blocks, count, out); return true;
    case 11: widen_all<Q3K>(blocks, count, out); return true;
    case 12: widen_all<Q45K<false>>(blocks, count, out); return true;
    case 13: widen_all<Q45K<true>>(blocks, count, out); return true;
    case 14: widen_all<Q6K>(blocks, count, out); return true;
    default: return false;
  }
}

}  // namespace tsjax::stored

// Called from Python, not from XLA: whether the type is known; then `out` has its numbers.
extern "C" int32_t tsjax_widen(int64_t kind, const uint8_t* blocks, int64_t count, float* out) {
  return tsjax::stored::widen_kind(kind, blocks, count, out);
}
