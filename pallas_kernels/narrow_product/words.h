// SPDX-License-Identifier: Apache-2.0
// Vectors of W words, each of four bytes or one integer, for AVX-512, AVX2 and NEON from one source.
// All of them compute the same integers.
#pragma once

#include <type_traits>

#include "../native/simd.h"

namespace tsjax {

// A number of 16 bits with five for the exponent.
struct half {
  uint16_t bits;
};

#if defined(__AVX2__)

// sums + the products of each word's four bytes with four that have a sign. Bytes are below 2^BITS.
template <int BITS>
inline __m256i add_dots(__m256i bytes, __m256i others, __m256i sums) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, bytes, others);
#else
  if (BITS < 8) {  // sums of two products have 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(bytes, others);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  const __m256i odd = _mm256_srli_epi16(bytes, 8);
  const __m256i other_even = _mm256_srai_epi16(_mm256_slli_epi16(others, 8), 8);
  const __m256i other_odd = _mm256_srai_epi16(others, 8);
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(even, other_even));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(odd, other_odd));
#endif
}

// `number` more in the bytes whose bits are set.
inline __m256i with_bits(__m256i x, const uint8_t* bits, int number) {
  int32_t mask;
  std::memcpy(&mask, bits, sizeof mask);
  const __m256i byte_of_each = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                 0x0303030303030303);
  const __m256i bit_of_each = _mm256_set1_epi64x(0x8040201008040201);
  const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(mask), byte_of_each), bit_of_each);
  const __m256i is_set = _mm256_cmpeq_epi8(found, bit_of_each);
  return _mm256_or_si256(x, _mm256_and_si256(is_set, _mm256_set1_epi8(number)));
}

#endif

#if defined(__AVX512F__)

using Words = __m512i;

inline Words set(int32_t x) { return _mm512_set1_epi32(x); }
inline Words load_words(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Words low_fours(Words x) { return _mm512_and_si512(x, set(0x0f0f0f0f)); }
inline Words high_fours(Words x) { return low_fours(_mm512_srli_epi32(x, 4)); }
inline Vector to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
template <int I>
inline Words byte_of(Words x) {
  return _mm512_and_si512(_mm512_srli_epi32(x, 8 * I), set(255));
}
template <int BITS>
inline Words add_dots(Words bytes, Words others, Words sums) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, bytes, others);
#else
  auto of_half = [&](auto half) {
    return add_dots<BITS>(_mm512_extracti64x4_epi64(bytes, half),
                          _mm512_extracti64x4_epi64(others, half),
                          _mm512_extracti64x4_epi64(sums, half));
  };
  const __m256i low = of_half(std::integral_constant<int, 0>());
  const __m256i high = of_half(std::integral_constant<int, 1>());
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#endif
}
inline Words with_bits(Words x, const uint8_t* bits, int number) {
#if defined(__AVX512BW__)
  uint64_t mask;
  std::memcpy(&mask, bits, sizeof mask);
  return _mm512_mask_add_epi8(x, mask, x, _mm512_set1_epi8(number));
#else
  const __m256i low = with_bits(_mm512_extracti64x4_epi64(x, 0), bits, number);
  const __m256i high = with_bits(_mm512_extracti64x4_epi64(x, 1), bits + 4, number);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#endif
}
inline Vector load(const half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

#elif defined(__AVX2__)

using Words = __m256i;

inline Words set(int32_t x) { return _mm256_set1_epi32(x); }
inline Words load_words(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Words low_fours(Words x) { return _mm256_and_si256(x, set(0x0f0f0f0f)); }
inline Words high_fours(Words x) { return low_fours(_mm256_srli_epi32(x, 4)); }
inline Vector to_floats(Words x) { return _mm256_cvtepi32_ps(x); }
template <int I>
inline Words byte_of(Words x) {
  return _mm256_and_si256(_mm256_srli_epi32(x, 8 * I), set(255));
}
inline Vector load(const half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

#else

using Words = int32x4_t;

inline Words set(int32_t x) { return vdupq_n_s32(x); }
inline Words load_words(const uint8_t* from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }
inline Words low_fours(Words x) { return vandq_s32(x, set(0x0f0f0f0f)); }
inline Words high_fours(Words x) {
  return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4));
}
inline Vector to_floats(Words x) { return vcvtq_f32_s32(x); }
template <int I>
inline Words byte_of(Words x) {
  return vandq_s32(vshlq_s32(x, set(-8 * I)), set(255));
}
template <int BITS>
inline Words add_dots(Words bytes, Words others, Words sums) {
  const uint8x16_t u = vreinterpretq_u8_s32(bytes);
  const int8x16_t s = vreinterpretq_s8_s32(others);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sums, u, s);
#elif defined(__ARM_FEATURE_DOTPROD)
  if (BITS < 8) return vdotq_s32(sums, vreinterpretq_s8_u8(u), s);
  const uint8x16_t bit = vdupq_n_u8(128);  // of bytes less 128, which have a sign
  sums = vdotq_s32(sums, vreinterpretq_s8_u8(veorq_u8(u, bit)), s);
  return vsubq_s32(sums, vdotq_s32(set(0), vreinterpretq_s8_u8(bit), s));
#else
  const int16x8_t u_low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u)));
  const int16x8_t u_high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(u)));
  const int16x8_t s_low = vmovl_s8(vget_low_s8(s)), s_high = vmovl_s8(vget_high_s8(s));
  auto pairs = [](int16x8_t a, int16x8_t b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)),
                      vmull_s16(vget_high_s16(a), vget_high_s16(b)));
  };
  return vaddq_s32(sums, vpaddq_s32(pairs(u_low, s_low), pairs(u_high, s_high)));
#endif
}
inline Words with_bits(Words x, const uint8_t* bits, int number) {
  const uint8x16_t of_each = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
  const uint8x8_t one = vcreate_u8(0x8040201008040201);
  const uint8x16_t is_set = vtstq_u8(of_each, vcombine_u8(one, one));
  const uint8x16_t more = vandq_u8(is_set, vdupq_n_u8(number));
  return vorrq_s32(x, vreinterpretq_s32_u8(more));
}
inline Vector load(const half* from) {
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
  return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

#endif

}  // namespace tsjax
