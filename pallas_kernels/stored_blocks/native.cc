// SPDX-License-Identifier: Apache-2.0
// The numbers of blocks as GGUF files store them: a few bits each, and scales that several share.
//
// Each number is made by the sums and products of the format's definition, in float32 and in its
// order, so that all who follow it have the same bits.

#include <cstdint>
#include <cstring>

namespace tsjax::stored {

inline float half(uint16_t bits) {
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

// What a block holds: integers from 0 on, and of each group of them its scale and least: those of the
// block, with two levels times the group's steps.
struct Parts {
  uint8_t q[256];
  uint16_t scale, least;  // float16
  int8_t steps[16], least_steps[16];
};

inline uint16_t bits_at(const uint8_t* from) { return from[0] | from[1] << 8; }

// Blocks of 32 numbers: a scale, for some a number to add, for some a fifth bit of each, and four bits
// of two numbers in a byte: those of the first half are the lower ones.
template <bool LEAST, bool WITH_FIFTH>
struct Fours {
  static constexpr bool TWO_LEVELS = false, WITH_LEAST = LEAST;
  static constexpr int NUMBERS = 32, GROUP = 32, ZERO = LEAST ? 0 : WITH_FIFTH ? 16 : 8;
  static constexpr int FIFTH = LEAST ? 4 : 2, REST = FIFTH + (WITH_FIFTH ? 4 : 0), BYTES = REST + 16;

  static void take(const uint8_t* block, Parts& to) {
    to.scale = bits_at(block);
    if (LEAST) to.least = bits_at(block + 2);
    uint32_t fifth = 0;
    if (WITH_FIFTH) std::memcpy(&fifth, block + FIFTH, sizeof fifth);
    for (int i = 0; i < 16; i++) {
      const int both = block[REST + i];
      to.q[i] = (both & 15) | (fifth >> i & 1) << 4;
      to.q[i + 16] = both >> 4 | (fifth >> (i + 16) & 1) << 4;
    }
  }
};

struct Eights {  // a scale, and a byte for each of 32 numbers
  static constexpr bool TWO_LEVELS = false, WITH_LEAST = false;
  static constexpr int NUMBERS = 32, GROUP = 32, ZERO = 128, BYTES = 34;

  static void take(const uint8_t* block, Parts& to) {
    to.scale = bits_at(block);
    for (int i = 0; i < 32; i++) to.q[i] = block[2 + i] ^ 128;
  }
};

// Blocks of 256 numbers, in groups of 16 or 32 that have scales of their own, of a few bits.

struct Q2K {
  static constexpr bool TWO_LEVELS = true, WITH_LEAST = true;
  static constexpr int NUMBERS = 256, GROUP = 16, ZERO = 0, BYTES = 16 + 64 + 4;

  static void take(const uint8_t* block, Parts& to) {
    const uint8_t *scales = block, *bits = block + 16;
    to.scale = bits_at(block + 80), to.least = bits_at(block + 82);
    for (int part = 0; part < 16; part++) {
      to.steps[part] = scales[part] & 15, to.least_steps[part] = -(scales[part] >> 4);
      const uint8_t* from = bits + part / 8 * 32 + part % 2 * 16;
      const int shift = part % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) to.q[part * 16 + i] = from[i] >> shift & 3;
    }
  }
};

struct Q3K {
  static constexpr bool TWO_LEVELS = true, WITH_LEAST = false;
  static constexpr int NUMBERS = 256, GROUP = 16, ZERO = 4, BYTES = 32 + 64 + 12 + 2;

  static void take(const uint8_t* block, Parts& to) {
    const uint8_t *third = block, *bits = block + 32, *scales = block + 96;
    to.scale = bits_at(block + 108);
    for (int part = 0; part < 16; part++) {
      const int low = scales[part % 8] >> part / 8 * 4 & 15;
      const int high = scales[8 + part % 4] >> part / 4 * 2 & 3;
      to.steps[part] = (low | high << 4) - 32;
      const uint8_t* from = bits + part / 8 * 32 + part % 2 * 16;
      const int shift = part % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) {
        const int bit = third[part % 2 * 16 + i] >> part / 2 & 1;
        to.q[part * 16 + i] = (from[i] >> shift & 3) | bit << 2;
      }
    }
  }
};

template <bool WITH_FIFTH>
struct Q45K {  // Q4_K and Q5_K
  static constexpr bool TWO_LEVELS = true, WITH_LEAST = true;
  static constexpr int NUMBERS = 256, GROUP = 32, ZERO = 0, REST = WITH_FIFTH ? 48 : 16;
  static constexpr int BYTES = REST + 128;

  static void take(const uint8_t* block, Parts& to) {
    to.scale = bits_at(block), to.least = bits_at(block + 2);
    const uint8_t *six = block + 4, *fifth = block + 16, *bits = block + REST;
    for (int part = 0; part < 8; part++) {
      if (part < 4) {
        to.steps[part] = six[part] & 63, to.least_steps[part] = -(six[part + 4] & 63);
      } else {
        to.steps[part] = (six[part + 4] & 15) | (six[part - 4] >> 6) << 4;
        to.least_steps[part] = -(six[part + 4] >> 4 | (six[part] >> 6) << 4);
      }
      const uint8_t* from = bits + part / 2 * 32;
      const int shift = part % 2 * 4;
      for (int i = 0; i < 32; i++) {
        const int high = WITH_FIFTH ? (fifth[i] >> part & 1) << 4 : 0;
        to.q[part * 32 + i] = (from[i] >> shift & 15) | high;
      }
    }
  }
};

struct Q6K {
  static constexpr bool TWO_LEVELS = true, WITH_LEAST = false;
  static constexpr int NUMBERS = 256, GROUP = 16, ZERO = 32, BYTES = 128 + 64 + 16 + 2;

  static void take(const uint8_t* block, Parts& to) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    to.scale = bits_at(block + 208);
    std::memcpy(to.steps, scales, 16);
    for (int part = 0; part < 16; part++) {
      const int eighth = part / 2;  // 32 numbers
      const uint8_t* lower = low + eighth / 4 * 64 + eighth % 2 * 32 + part % 2 * 16;
      const uint8_t* upper = high + eighth / 4 * 32 + part % 2 * 16;
      const int low_shift = eighth % 4 / 2 * 4, high_shift = eighth % 4 * 2;
      for (int i = 0; i < 16; i++) {
        to.q[part * 16 + i] = (lower[i] >> low_shift & 15) | (upper[i] >> high_shift & 3) << 4;
      }
    }
  }
};

template <class Block>
void widen_all(const uint8_t* blocks, int64_t count, float* out) {
  Parts parts;
  for (int64_t b = 0; b < count; b++, out += Block::NUMBERS) {
    Block::take(blocks + b * Block::BYTES, parts);
    const float of_scale = half(parts.scale), of_least = Block::WITH_LEAST ? half(parts.least) : 0.0f;
    for (int group = 0; group < Block::NUMBERS / Block::GROUP; group++) {
      const float scale = Block::TWO_LEVELS ? of_scale * parts.steps[group] : of_scale;
      const float less = Block::TWO_LEVELS ? of_least * -parts.least_steps[group] : -of_least;
      for (int i = group * Block::GROUP; i < (group + 1) * Block::GROUP; i++) {
        const float x = static_cast<float>(parts.q[i] - Block::ZERO) * scale;
        out[i] = Block::WITH_LEAST ? x - less : x;
      }
    }
  }
}

// Arrays with the parts of all blocks, one after the other; those that a type lacks are not written.
struct Taken {
  uint8_t* q;
  uint16_t* scales;
  int8_t* steps;
  uint16_t* least;
  int8_t* least_steps;
};

template <class Block>
void take_all(const uint8_t* blocks, int64_t count, const Taken& to) {
  constexpr int GROUPS = Block::NUMBERS / Block::GROUP;
  Parts parts;
  for (int64_t b = 0; b < count; b++) {
    Block::take(blocks + b * Block::BYTES, parts);
    std::memcpy(to.q + b * Block::NUMBERS, parts.q, Block::NUMBERS);
    to.scales[b] = parts.scale;
    if (Block::WITH_LEAST) to.least[b] = parts.least;
    if (Block::TWO_LEVELS) std::memcpy(to.steps + b * GROUPS, parts.steps, GROUPS);
    if (Block::TWO_LEVELS && Block::WITH_LEAST) {
      std::memcpy(to.least_steps + b * GROUPS, parts.least_steps, GROUPS);
    }
  }
}

// f(block) for the type of that number in files; whether it is known.
template <class F>
bool with_kind(int64_t kind, F f) {
  switch (kind) {
    case 2: f(Fours<false, false>()); return true;
    case 3: f(Fours<true, false>()); return true;
    case 6: f(Fours<false, true>()); return true;
    case 7: f(Fours<true, true>()); return true;
    case 8: f(Eights()); return true;
    case 10: f(Q2K()); return true;
    case 11: f(Q3K()); return true;
    case 12: f(Q45K<false>()); return true;
    case 13: f(Q45K<true>()); return true;
    case 14: f(Q6K()); return true;
    default: return false;
  }
}

}  // namespace tsjax::stored

// Called from Python, not from XLA: whether the type is known; then `out` has its numbers.
extern "C" int32_t tsjax_widen(int64_t kind, const uint8_t* blocks, int64_t count, float* out) {
  using namespace tsjax::stored;
  return with_kind(kind, [&](auto block) { widen_all<decltype(block)>(blocks, count, out); });
}

// As it, for the integers and levels that make these numbers.
extern "C" int32_t tsjax_take_apart(int64_t kind, const uint8_t* blocks, int64_t count, uint8_t* q,
                                    uint16_t* scales, int8_t* steps, uint16_t* least,
                                    int8_t* least_steps) {
  using namespace tsjax::stored;
  const Taken to{q, scales, steps, least, least_steps};
  return with_kind(kind, [&](auto block) { take_all<decltype(block)>(blocks, count, to); });
}
