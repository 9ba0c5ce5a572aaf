// SPDX-License-Identifier: Apache-2.0
// Vectors of W floats, for AVX-512, AVX2 and NEON from one source.
//
// Sums are written with fma() and never left to the compiler (-ffp-contract=off), so that a kernel
// computes the same bits in every instance of a template.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "the kernels need AVX2 with FMA, AVX-512 or NEON"
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // so that arrays of vectors are registers

namespace tsjax {

// A number of the cache or of the weights as it lies in memory.
struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(bfloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, bfloat16* to) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// What T makes of a number.
template <class T, class From>
inline float rounded(From x) {
  T number;
  from_float(to_float(x), &number);
  return to_float(number);
}

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int W = 16, REGISTERS = 32;

inline Vector set(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector load(const bfloat16* from) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vector load(const int8_t* from) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector round(Vector x) { return _mm512_roundscale_ps(x, 0); }
inline Vector times_power_of_2(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }
inline Vector where_less(Vector a, Vector b, Vector yes, Vector no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

#elif defined(__AVX2__)

using Vector = __m256;
constexpr int W = 8, REGISTERS = 16;

inline Vector set(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector load(const bfloat16* from) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vector load(const int8_t* from) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector round(Vector x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vector times_power_of_2(Vector x, Vector n) {  // for n from -126 to 127
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vector where_less(Vector a, Vector b, Vector yes, Vector no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

#else

using Vector = float32x4_t;
constexpr int W = 4, REGISTERS = 32;

inline Vector set(float x) { return vdupq_n_f32(x); }
inline Vector load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, Vector x) { vst1q_f32(to, x); }
inline Vector load(const bfloat16* from) {
  uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}
inline Vector load(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
inline Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
inline Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
inline Vector round(Vector x) { return vrndnq_f32(x); }
inline Vector times_power_of_2(Vector x, Vector n) {  // for n from -126 to 127
  int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
inline Vector where_less(Vector a, Vector b, Vector yes, Vector no) {
  return vbslq_f32(vcltq_f32(a, b), yes, no);
}

#endif

// Has x in a register: GCC would rather read it from memory at each use, which takes longer.
template <class Any>
inline void keep(Any& x) {
#if defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+v"(x));
#endif
}

// How rows of T are multiplied: by whole vectors of STEP numbers, which add up in a Vector of sums.
template <class T>
struct Multiplied {  // widened to floats: part l of a sum takes the entries l, l + W, ...
  using Number = float;
  using Numbers = Vector;
  static constexpr int STEP = W;
  template <class Other>
  static Numbers load(const Other* from) {
    return tsjax::load(from);
  }
  static void store(Number* to, Numbers x) { tsjax::store(to, x); }
};

#if defined(__AVX512BF16__)
// The processor's own products of pairs: part l takes the entries 2l and 2l + 1, then 2W further.
// The products are exact; what is too small for a normal float counts as zero.
using Pairs = __m512i;

inline void store(bfloat16* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

inline Vector fma(Pairs a, Pairs b, Vector c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

template <>
struct Multiplied<bfloat16> {
  using Number = bfloat16;
  using Numbers = Pairs;
  static constexpr int STEP = 2 * W;
  static Numbers load(const bfloat16* from) { return _mm512_loadu_si512(from); }
  static Numbers load(const int8_t* from) {  // each of them is exact in eight bits
    return reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(tsjax::load(from + W), tsjax::load(from)));
  }
  static void store(bfloat16* to, Numbers x) { _mm512_storeu_si512(to, x); }
};
#endif

// The sum of a vector's entries, halves first.
inline float sum(Vector x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  __m256 high = _mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0x4e));
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), high);
#else
  __m256 eight = x;
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
#endif
}

// The sum of each of W vectors, in the order of sum().
inline Vector totals(const Vector* x) {
#if defined(__AVX512F__)
  Vector half[8], quarter[4], eighth[2];
  UNROLLED for (int i = 0; i < 8; i++) {
    half[i] = _mm512_shuffle_f32x4(x[i], x[i + 8], 0x44) +
              _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee);
  }
  UNROLLED for (int i = 0; i < 4; i++) {
    quarter[i] = _mm512_shuffle_f32x4(half[i], half[i + 4], 0x88) +
                 _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd);
  }
  UNROLLED for (int i = 0; i < 2; i++) {
    Vector a = quarter[2 * i], b = quarter[2 * i + 1];
    eighth[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  Vector all = _mm512_shuffle_ps(eighth[0], eighth[1], 0x88) +
               _mm512_shuffle_ps(eighth[0], eighth[1], 0xdd);
  return _mm512_shuffle_f32x4(all, all, 0xd8);  // they came as 0-3, 8-11, 4-7, 12-15
#elif defined(__AVX2__)
  Vector half[4], quarter[2];
  UNROLLED for (int i = 0; i < 4; i++) {
    half[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20) +
              _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  UNROLLED for (int i = 0; i < 2; i++) {
    Vector a = half[2 * i], b = half[2 * i + 1];
    quarter[i] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
  }
  return _mm256_shuffle_ps(quarter[0], quarter[1], 0x88) +
         _mm256_shuffle_ps(quarter[0], quarter[1], 0xdd);
#else
  return Vector{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])};
#endif
}

#if defined(__AVX512F__)
// 16 vectors as the rows of a square: its columns.
inline void turn(const Vector* x, Vector* columns) {
  auto two = [](Vector a) { return _mm512_castps_pd(a); };
  Vector pairs[16], fours[16];  // of rows; a vector has every fourth column
  UNROLLED for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  UNROLLED for (int i = 0; i < 16; i += 4) {
    UNROLLED for (int j = 0; j < 2; j++) {
      __m512d above = two(pairs[i + j]), below = two(pairs[i + j + 2]);
      fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(above, below));
      fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(above, below));
    }
  }
  UNROLLED for (int c = 0; c < 4; c++) {
    Vector even[2], odd[2];  // of the columns c, c + 4, c + 8 and c + 12
    UNROLLED for (int i = 0; i < 2; i++) {
      even[i] = _mm512_shuffle_f32x4(fours[8 * i + c], fours[8 * i + 4 + c], 0x88);
      odd[i] = _mm512_shuffle_f32x4(fours[8 * i + c], fours[8 * i + 4 + c], 0xdd);
    }
    columns[c] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
    columns[c + 4] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    columns[c + 8] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    columns[c + 12] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
}
#endif

inline float largest(Vector x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#endif
#else
  return vmaxvq_f32(x);
#endif
}

// 2^x for x <= 0, to two units in the last place: exactly 1 for 0, exactly 0 below 2^-126.
inline Vector power_of_2(Vector x) {
  Vector clipped = max(x, set(-126.0f));
  Vector n = round(clipped), f = clipped - n;  // f from -1/2 to 1/2
  Vector p = set(1.535336188319500e-4f);
  p = fma(p, f, set(1.339887440266574e-3f));
  p = fma(p, f, set(9.618437357674640e-3f));
  p = fma(p, f, set(5.550332471162809e-2f));
  p = fma(p, f, set(2.402264791363012e-1f));
  p = fma(p, f, set(6.931472028550421e-1f));
  p = fma(p, f, set(1.0f));
  return where_less(x, set(-126.0f), set(0.0f), times_power_of_2(p, n));
}

inline float power_of_2(float x) {
  float entries[W];
  store(entries, power_of_2(set(x)));
  return entries[0];
}

// Into the second cache: the first is full of what is worked with.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace tsjax
