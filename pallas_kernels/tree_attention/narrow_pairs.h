// SPDX-License-Identifier: Apache-2.0
// Blocks of narrow rows as pairs of bfloat16: whole numbers, which the caller's powers of two follow.
//
// What pairs.h does with wide rows, in the same order and to the same bits. Few query rows widen a
// block in registers, once for each half of it; many have it widened in memory, once for them all.
#pragma once

#include <array>
#include <bit>

namespace tsjax::attention {

constexpr int64_t FEW = 8;  // rows whose sums of two vectors fill the registers beside the tables
static_assert(FEW <= MOST_WEIGHED && MOST_ROWS <= MOST_WEIGHED);

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// Numbers from -127 to 127 become bfloat16 by a table of magnitudes for each of the two bytes.
class Widening {
 public:
  using Bytes = std::array<uint8_t, 64>;

  // Numbers 4l, 4l + 1, then 4l + 2, 4l + 3, as the pair l of a vector: of keys that were turned.
  void by_twos(Pairs numbers, Pairs& first, Pairs& second) const {
    Pairs low, high;
    look_up(numbers, low, high);
    first = _mm512_permutex2var_epi8(low, first_, high);
    second = _mm512_permutex2var_epi8(low, second_, high);
  }

  // The values of two places side by side, as join() of pairs.h has them.
  void joined(const int8_t* even, const int8_t* odd, __mmask32 there, Pairs& low, Pairs& high) const {
    const Pairs a = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(there, even));
    const Pairs b = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(there, odd));
    Pairs lows, highs;
    look_up(_mm512_permutex2var_epi8(a, joined_, b), lows, highs);
    low = _mm512_unpacklo_epi8(lows, highs), high = _mm512_unpackhi_epi8(lows, highs);
  }

 private:
  void look_up(Pairs numbers, Pairs& low, Pairs& high) const {
    const Pairs magnitudes = _mm512_abs_epi8(numbers);
    low = _mm512_permutex2var_epi8(low_[0], magnitudes, low_[1]);
    high = _mm512_permutex2var_epi8(high_[0], magnitudes, high_[1]);
    high = _mm512_ternarylogic_epi32(high, numbers, _mm512_set1_epi8(-128), 0xf8);  // and the sign
  }

  template <class Of>
  static Pairs table(Of of) {
    Bytes bytes;
    for (int i = 0; i < 64; i++) bytes[i] = static_cast<uint8_t>(of(i));
    return _mm512_loadu_si512(bytes.data());
  }
  static int bits_of(int magnitude) {
    return static_cast<int>(std::bit_cast<uint32_t>(static_cast<float>(magnitude)) >> 16);
  }

  // Places in two vectors: those of the second begin at 64.
  const Pairs first_ = table([](int i) { return i % 2 * 64 + i / 4 * 4 + i % 4 / 2; });
  const Pairs second_ = table([](int i) { return i % 2 * 64 + i / 4 * 4 + i % 4 / 2 + 2; });
  const Pairs joined_ = table([](int i) { return i % 2 * 64 + i / 2; });
  const Pairs low_[2] = {table([](int i) { return bits_of(i); }),
                         table([](int i) { return bits_of(i + 64); })};
  const Pairs high_[2] = {table([](int i) { return bits_of(i) >> 8; }),
                          table([](int i) { return bits_of(i + 64) >> 8; })};
};

inline const Widening& widening() {
  static const Widening widening;
  return widening;
}

// Which of the numbers i, i + 1, ... there are.
inline __mmask64 numbers_from(int64_t i, int64_t H) {
  return H - i >= 64 ? ~uint64_t{0} : (uint64_t{1} << (H - i)) - 1;
}

// The keys of a block turned by fours: numbers 4i .. 4i + 3 of slot s at turned[4 * (i * BLOCK + s)].
inline void turn_fours(const int8_t* keys, int64_t H, int8_t* turned) {
  for (int64_t i = 0; i < H; i += 64) {
    const __mmask64 there = numbers_from(i, H);
    for (int64_t s = 0; s < BLOCK; s += W) {
      Vector rows[W], columns[W];
      UNROLLED for (int j = 0; j < W; j++) {
        rows[j] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(there, keys + (s + j) * H + i));
      }
      turn(rows, columns);
      UNROLLED for (int j = 0; j < W; j++) {
        _mm512_storeu_ps(turned + (i + 4 * j) * BLOCK + 4 * s, columns[j]);
      }
    }
  }
}

// What they are as pairs, for turn_pairs' readers.
inline void widen_turned(const int8_t* turned, int64_t width, bfloat16* pairs) {
  const Widening widening = attention::widening();
  for (int64_t i = 0; i < width; i += 4) {
    for (int64_t s = 0; s < BLOCK; s += W) {
      Pairs first, second;
      widening.by_twos(_mm512_loadu_si512(turned + i * BLOCK + 4 * s), first, second);
      _mm512_storeu_si512(pairs + i * BLOCK + 2 * s, first);
      _mm512_storeu_si512(pairs + (i + 2) * BLOCK + 2 * s, second);
    }
  }
}

inline void widen_joined(const int8_t* values, int64_t H, int64_t width, bfloat16* joined) {
  const Widening widening = attention::widening();
  for (int64_t s = 0; s < BLOCK; s += 2) {
    for (int64_t i = 0; i < width; i += STEP, joined += 2 * STEP) {
      const int8_t* even = values + s * H + i;
      Pairs low, high;
      widening.joined(even, even + H, static_cast<__mmask32>(numbers_from(i, H)), low, high);
      _mm512_storeu_si512(joined, low), _mm512_storeu_si512(joined + STEP, high);
    }
  }
}

// Vectors of sums beside each row's: about eleven in all, as a sum waits so long for its last product
// (Zen 4), and no more than there are registers for.
constexpr int64_t beside(int R) { return R <= 3 ? 4 : 2; }

// As score_pairs, of turn_fours' keys.
template <int R>
void score_fours(const bfloat16* q, const int8_t* turned, int64_t width, const float* scales,
                 float* scores, Next next) {
  const Widening widening = attention::widening();
  constexpr int C = beside(R);
  for (int64_t s = 0; s < BLOCK; s += C * W) {
    Vector sums[R][C];
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = set(0.0f);
    Pairs first[C], second[C];
    auto widen = [&](int64_t i) {
      UNROLLED for (int c = 0; c < C; c++) {
        const int8_t* from = turned + i * BLOCK + 4 * (s + c * W);
        widening.by_twos(_mm512_loadu_si512(from), first[c], second[c]);
      }
    };
    widen(0);
    for (int64_t i = 0; i < width; i += 4) {
      next.fetch_lines<C>((s * width / (C * W) + i) / 4 * C);  // `width` lines in all
      Pairs now[2][C];
      UNROLLED for (int c = 0; c < C; c++) now[0][c] = first[c], now[1][c] = second[c];
      widen(i + 4);  // for the next turn, as it takes long; after the last one, what nobody reads
      UNROLLED for (int j = 0; j < 2; j++) {
        add_products(sums, [&](int r) { return same_pair(q + r * width + i + 2 * j); },
                     [&](int c) { return now[j][c]; });
      }
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) {
        const int64_t at = s + c * W;
        store(scores + r * BLOCK + at, sums[r][c] * load(scales + at));
      }
  }
}

// As add_joined, of values as they lie: C vectors of columns, from `first` on.
template <int R, int C>
void add_columns(const bfloat16* weights, const int8_t* values, int64_t H, float* out,
                 int64_t width, int64_t first, Next next) {
  const Widening widening = attention::widening();
  float* to = out + first;
  Vector sums[R][C];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int c = 0; c < C; c++) sums[r][c] = load(to + r * width + c * W);
  Pairs both[C];
  auto widen = [&](int64_t s) {
    UNROLLED for (int c = 0; c < C; c += 2) {
      const int64_t i = first + c * W;
      const auto there = static_cast<__mmask32>(numbers_from(i, H));
      const int8_t* even = values + s * H + i;
      widening.joined(even, even + H, there, both[c], both[c + 1]);
    }
  };
  widen(0);
  for (int64_t s = 0; s < BLOCK; s += 2) {
    next.fetch_lines<C / 2>(first + s / 2 * (C / 2));  // `width` lines in all
    Pairs now[C];
    UNROLLED for (int c = 0; c < C; c++) now[c] = both[c];
    widen(std::min<int64_t>(s + 2, BLOCK - 2));
    add_products(sums, [&](int r) { return same_pair(weights + r * BLOCK + s); },
                 [&](int c) { return now[c]; });
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int c = 0; c < C; c++) store(to + r * width + c * W, sums[r][c]);
}

template <int R>
void add_narrow(const bfloat16* weights, const int8_t* values, int64_t H, float* out, int64_t width,
                Next next) {
  constexpr int C = beside(R);
  int64_t i = 0;
  for (; i + C * W <= width; i += C * W) add_columns<R, C>(weights, values, H, out, width, i, next);
  if (i < width) add_columns<R, 2>(weights, values, H, out, width, i, next);
}

#endif

}  // namespace tsjax::attention
