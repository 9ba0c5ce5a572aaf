// SPDX-License-Identifier: Apache-2.0
// Attention by the processor's products of pairs of bfloat16 (see Multiplied in native/simd.h).
//
// A score is one sum over the pairs of a key's entries, in order, and then scaled. Weights are rounded
// to bfloat16; a column of the values is one sum over pairs of places, in order. So keys are turned and
// the values of two places are laid side by side, once for all rows.
#pragma once

namespace tsjax::attention {

#if defined(__AVX512BF16__)

constexpr int64_t PAIRS = BLOCK / 2;  // of places
constexpr int64_t STEP = Multiplied<bfloat16>::STEP;

inline Pairs load_pairs(const bfloat16* from) { return Multiplied<bfloat16>::load(from); }
inline Pairs same_pair(const bfloat16* from) {  // in each place of a vector
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}

#endif

}  // namespace tsjax::attention

#include "narrow_pairs.h"

namespace tsjax::attention {

#if defined(__AVX512BF16__)

// The keys of a block turned: pair i of slot s at turned[2 * (i * BLOCK + s)].
inline void turn_pairs(const bfloat16* keys, int64_t width, bfloat16* turned) {
  for (int64_t s = 0; s < BLOCK; s += W) {
    for (int64_t i = 0; i < width; i += STEP) {
      Vector rows[W], columns[W];
      UNROLLED for (int j = 0; j < W; j++) {
        rows[j] = _mm512_castsi512_ps(load_pairs(keys + (s + j) * width + i));
      }
      turn(rows, columns);
      UNROLLED for (int j = 0; j < W; j++) {
        _mm512_storeu_ps(turned + (i + 2 * j) * BLOCK + 2 * s, columns[j]);
      }
    }
  }
}

// The values of two places side by side, column by column in the order of `columns`.
inline void join(const bfloat16* even, const bfloat16* odd, int64_t width, bfloat16* joined) {
  for (int64_t i = 0; i < width; i += STEP, joined += 2 * STEP) {
    const Pairs a = load_pairs(even + i), b = load_pairs(odd + i);
    _mm512_storeu_si512(joined, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(joined + STEP, _mm512_unpackhi_epi16(a, b));
  }
}

// A row's sums in the columns' own order.
inline void in_order(float* sums, int64_t width) {
  const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  for (int64_t i = 0; i < width; i += STEP) {
    const Vector low = load(sums + i), high = load(sums + i + W);
    store(sums + i, _mm512_permutex2var_ps(low, at, high));
    store(sums + i + W, _mm512_permutex2var_ps(low, _mm512_add_epi32(at, _mm512_set1_epi32(8)), high));
  }
}

// What is wanted `next` is fetched all along, not at once: a core waits for so many lines.
template <int R>
void score_pairs(const bfloat16* q, const bfloat16* turned, int64_t width, const float* scales,
                 float* scores, Next next) {
  constexpr int C = BLOCK / W;
  Vector sums[R][C];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int c = 0; c < C; c++) sums[r][c] = set(0.0f);
  for (int64_t i = 0; i < width; i += 2) {
    for (int64_t s = i * BLOCK / width; s < (i + 2) * BLOCK / width; s++) next.fetch(s);
    add_products(sums, [&](int r) { return same_pair(q + r * width + i); },
                 [&](int c) { return load_pairs(turned + i * BLOCK + c * STEP); });
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int c = 0; c < C; c++) {
      store(scores + r * BLOCK + c * W, sums[r][c] * load(scales + c * W));
    }
}

template <int R>
void add_joined(const bfloat16* weights, const bfloat16* joined, float* out, int64_t width,
                Next next) {
  for_pieces<most_vectors(R)>(width / W, [&](auto piece, int64_t first) {
    constexpr int C = piece;
    float* to = out + first * W;
    Vector sums[R][C];
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = load(to + r * width + c * W);
    for (int64_t s = 0; s < PAIRS; s++) {
      if (first == 0) next.fetch(2 * s), next.fetch(2 * s + 1);
      add_products(sums, [&](int r) { return same_pair(weights + r * BLOCK + 2 * s); },
                   [&](int c) { return load_pairs(joined + 2 * s * width + (first + c) * STEP); });
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) store(to + r * width + c * W, sums[r][c]);
  });
}

struct PairGroup : Rows<bfloat16> {
  int64_t width;
  bool numbers_first;  // of narrow rows; the powers of two later
  float *scores, *evenly;  // of a tile; what the scores of wide keys are multiplied by
  float *scales, *powers;  // what those of narrow keys and the weights of narrow values are
  bfloat16 *q, *turned, *joined, *own, *copied, *weights;

  static int64_t width_of(int64_t H) { return (H + STEP - 1) / STEP * STEP; }
  static int64_t memory(int64_t width) {
    return (FEW + 3) * BLOCK + (GROUP * width + 4 * BLOCK * width + FEW * BLOCK) / 2;
  }

  PairGroup(const Arrays<bfloat16>& arrays, int64_t b, int64_t k, int64_t first, float* memory)
      : Rows(arrays, b, k, first), width(width_of(arrays.H)), scores(memory) {
    evenly = scores + FEW * BLOCK, scales = evenly + BLOCK, powers = scales + BLOCK;
    std::fill(evenly, evenly + BLOCK, scale());
    q = reinterpret_cast<bfloat16*>(powers + BLOCK);
    turned = q + GROUP * width, joined = turned + BLOCK * width, own = joined + BLOCK * width;
    copied = own + BLOCK * width, weights = copied + BLOCK * width;
    for (int64_t r = 0; r < rows; r++) copy(query(r), H, 1, q + r * width);
    numbers_first = arrays.k_cache.is_narrow() && are_moderate(q, rows * width);
  }

  float scale() const { return LOG2_E / std::sqrt(static_cast<float>(H)); }

  // Rows that lie `stride` apart, with zeros after their ends.
  void copy(const bfloat16* from, int64_t stride, int64_t count, bfloat16* to) const {
    for (int64_t i = 0; i < count; i++, from += stride, to += width) {
      std::memcpy(to, from, H * sizeof *from);
      std::fill(to + H, to + width, bfloat16{0});
    }
  }
  void copy(const Stored<bfloat16>& cache, int64_t slot, int64_t count, bfloat16* to) const {
    if (cache.is_narrow()) {
      cache.widen(row_of(slot), count, H, width, to);
    } else {
      copy(cached(cache, slot), H, count, to);
    }
  }
  const bfloat16* whole(const Stored<bfloat16>& cache, int64_t slot) const {
    if (width == H && !cache.is_narrow()) return cached(cache, slot);
    copy(cache, slot, BLOCK, copied);
    return copied;
  }
  void join_all(const bfloat16* values) const {
    for (int64_t s = 0; s < BLOCK; s += 2) {
      join(values + s * width, values + (s + 1) * width, width, joined + s * width);
    }
  }
  void score(int64_t r, int64_t R, const float* scales, Next next) const {
    for_number<MOST_ROWS>(R, [&](auto rows) {
      score_pairs<rows>(q + r * width, turned, width, scales, scores, next);
    });
  }
  // Adds values with the weights of R rows to their sums.
  void add(const bfloat16* values, int64_t r, int64_t R, Sums sums, Next next) const {
    for_number<MOST_ROWS>(R, [&](auto rows) {
      add_joined<rows>(weights, values, sums.out + r * width, width, next);
    });
  }

  void add_whole_blocks(int64_t part, Sums sums) {
    int64_t end = std::min((part + 1) * PART, committed / BLOCK * BLOCK);
    for (int64_t slot = part * PART; slot < end; slot += BLOCK) {
      if (!sees_some(slot) || add_numbers(slot, sums)) continue;
      turn_pairs(whole(arrays.k_cache, slot), width, turned);
      join_all(whole(arrays.v_cache, slot));
      add_block(slot, evenly, nullptr, sums);
    }
  }

  // The block whose keys were turned and whose values were joined.
  void add_block(int64_t slot, const float* scales, const float* powers, Sums sums) const {
    const int64_t tile = tile_of(rows, MOST_ROWS);
    for (int64_t r = 0, R; r < rows; r += R) {
      R = std::min(tile, rows - r);
      score(r, R, scales, r ? Next() : after(arrays.k_cache, slot));
      hide(scores, r, R, slot);
      weigh(scores, weights, sums, r, R, width, powers);
      add(joined, r, R, sums, r ? Next() : after(arrays.v_cache, slot));
    }
  }

  // Adds a narrow block by its numbers, if that is possible.
  bool add_numbers(int64_t slot, Sums sums) {
#if defined(__AVX512VBMI__)
    const auto &k = arrays.k_cache, &v = arrays.v_cache;
    const int64_t row = row_of(slot);
    if (!numbers_first || !k.powers(row, scale(), scales) || !v.powers(row, 1.0f, powers)) return false;
    const int8_t* values = v.numbers + row * H;
    int8_t* fours = reinterpret_cast<int8_t*>(copied);
    turn_fours(k.numbers + row * H, H, fours);
    if (rows > FEW) {
      widen_turned(fours, width, turned);
      widen_joined(values, H, width, joined);
      add_block(slot, scales, powers, sums);
      return true;
    }
    for_number<FEW>(rows, [&](auto rows) {
      score_fours<rows>(q, fours, width, scales, scores, after(k, slot));
    });
    hide(scores, 0, rows, slot);
    weigh(scores, weights, sums, 0, rows, width, powers);
    for_number<FEW>(rows, [&](auto rows) {
      add_narrow<rows>(weights, values, H, sums.out, width, after(v, slot));
    });
    return true;
#else
    return false;
#endif
  }

  // As Group's.
  template <class SumsOf>
  void add_tail(SumsOf sums_of) {
    const int64_t cached_slots = committed % BLOCK, start = committed - cached_slots;
    const auto seen = this->seen();
    const int64_t fresh_rows = seen.reach, most_places = cached_slots + seen.most;
    auto seen_by = [&](int64_t r) -> const std::vector<int32_t>& {
      return seen.by_row[fresh_row(r) - fresh_row(0)];
    };
    // Whether it sees all before its last one, as in a text: then its places are those of all.
    auto in_a_line = [&](int64_t r) {
      const auto& of_row = seen_by(r);
      return of_row.empty() || of_row.back() + 1 == static_cast<int64_t>(of_row.size());
    };
    // All that any row of the group sees, in order; the scores of all rows with it.
    const int64_t all = cached_slots + fresh_rows, most = (all + BLOCK - 1) / BLOCK * BLOCK;
    float* scored = scratch<1>(rows * most);
    bfloat16* values = scratch<2, bfloat16>((most + 1) * width);  // and zeros
    bfloat16* some = scratch<3, bfloat16>(BLOCK * width);
    auto gather = [&](const Stored<bfloat16>& cache, const bfloat16* rows, int64_t place,
                      bfloat16* to) {
      const int64_t from_cache = std::clamp<int64_t>(cached_slots - place, 0, BLOCK);
      const int64_t from_fresh = std::min<int64_t>(BLOCK, all - place) - from_cache;
      if (from_cache) copy(cache, start + place, from_cache, to);
      if (from_fresh > 0) {
        copy(fresh(rows, place + from_cache - cached_slots), fresh_stride(), from_fresh,
             to + from_cache * width);
      }
      std::fill(to + (from_cache + from_fresh) * width, to + BLOCK * width, bfloat16{0});
    };
    std::fill(values + most * width, values + (most + 1) * width, bfloat16{0});
    for (int64_t place = 0; place < all; place += BLOCK) {
      gather(arrays.v_cache, arrays.v_new, place, values + place * width);
      gather(arrays.k_cache, arrays.k_new, place, some);
      turn_pairs(some, width, turned);
      for (int64_t r = 0, R; r < rows; r += R) {
        R = std::min(MOST_ROWS, rows - r);
        score(r, R, evenly, Next());
        for (int64_t i = 0; i < R; i++) {
          std::copy_n(scores + i * BLOCK, BLOCK, scored + (r + i) * most + place);
        }
      }
    }
    for (int64_t place = 0; place < most_places; place += BLOCK) {
      Sums sums = sums_of((start + place) / PART);
      join_all(values + place * width);
      int64_t joined_of = -1;  // the fresh row whose own values are joined
      for (int64_t r = 0, R; r < rows; r += R) {
        const bool line = in_a_line(r);
        auto goes_along = [&](int64_t other) {
          return line ? in_a_line(other) : fresh_row(other) == fresh_row(r);
        };
        for (R = 1; R < MOST_ROWS && r + R < rows && goes_along(r + R);) R++;
        auto at = [&](const std::vector<int32_t>& of_row, int j) {  // among all
          const int64_t own_place = place + j;
          return own_place < cached_slots ? own_place : cached_slots + of_row[own_place - cached_slots];
        };
        auto count = [&](const std::vector<int32_t>& of_row) {
          const int64_t places = cached_slots + static_cast<int64_t>(of_row.size());
          return static_cast<int>(std::clamp<int64_t>(places - place, 0, BLOCK));
        };
        for (int64_t i = 0; i < R; i++) {
          const auto& of_row = seen_by(r + i);
          for (int j = 0; j < BLOCK; j++) {
            float& score = scores[i * BLOCK + j];
            score = ABSENT;
            if (j >= count(of_row)) continue;
            const int64_t from = at(of_row, j);
            if (from >= cached_slots || sees(r + i, start + from)) {
              score = scored[(r + i) * most + from];
            }
          }
        }
        if (!line && joined_of != fresh_row(r)) {
          joined_of = fresh_row(r);
          const auto& of_row = seen_by(r);
          auto value = [&](int j) {
            return values + (j < count(of_row) ? at(of_row, j) : most) * width;
          };
          for (int s = 0; s < BLOCK; s += 2) join(value(s), value(s + 1), width, own + s * width);
        }
        weigh(scores, weights, sums, r, R, width);
        add(line ? joined : own, r, R, sums, Next());
      }
    }
  }

  void finish(Sums sums) {
    std::vector<float> mean(width);
    for (int64_t r = 0; r < rows; r++) {
      in_order(sums.out + r * width, width);
      write(sums, r, width, mean.data());
    }
  }
};

template <class T>
using GroupOf = std::conditional_t<std::is_same_v<T, bfloat16>, PairGroup, Group<T>>;

#else

template <class T>
using GroupOf = Group<T>;

#endif

}  // namespace tsjax::attention
