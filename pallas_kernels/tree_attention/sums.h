// SPDX-License-Identifier: Apache-2.0
// The running softmax of attention's rows: block by block, and part by part.
#pragma once

#include "../native/rows.h"

namespace tsjax::attention {

constexpr int64_t MOST_WEIGHED = 8;  // rows at a time, as many as anybody has
constexpr float NOTHING = -1e30f;  // the peak of nothing: finite, so that no inf - inf arises

// A running softmax of some rows. Scores are logarithms to base 2.
struct Sums {
  float *peak, *total, *out;

  static int64_t size(int64_t rows, int64_t width) { return rows * (2 + width); }
  Sums(float* memory, int64_t rows) : peak(memory), total(memory + rows), out(memory + 2 * rows) {}
  void clear(int64_t rows, int64_t width) {
    std::fill(peak, peak + rows, NOTHING);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * width, 0.0f);
  }
};

inline void scale(float* out, int64_t width, float by) {
  for (int64_t i = 0; i < width; i += W) store(out + i, load(out + i) * set(by));
}

// A block's scores of R rows, which begin with r, become weights; what was summed shrinks to the new
// peaks. `weights` may be the scores' own memory. With `powers`, those of the values' rows, they are
// the weights of the rows' numbers.
template <class Number>
void weigh(const float* scores, Number* weights, Sums sums, int64_t r, int64_t R, int64_t width,
           const float* powers = nullptr) {
  constexpr int C = BLOCK / W;
  float peaks[MOST_WEIGHED];
  for (int64_t i = 0; i < R; i++) {  // of all rows first: each waits long for its own
    Vector most = load(scores + i * BLOCK);
    UNROLLED for (int c = 1; c < C; c++) most = max(most, load(scores + i * BLOCK + c * W));
    peaks[i] = std::max(sums.peak[r + i], largest(most));
  }
  for (int64_t i = 0; i < R; i++, r++, scores += BLOCK, weights += BLOCK) {
    const float peak = peaks[i];
    Vector total = set(0.0f);
    UNROLLED for (int c = 0; c < C; c++) {
      const Vector weight = power_of_2(load(scores + c * W) - set(peak));
      store(weights + c * W, powers ? weight * load(powers + c * W) : weight);
      total = total + weight;
    }
    if (peak != sums.peak[r]) {
      const float shrink = power_of_2(sums.peak[r] - peak);
      sums.total[r] = sums.total[r] * shrink;
      scale(sums.out + r * width, width, shrink);
      sums.peak[r] = peak;
    }
    sums.total[r] = sums.total[r] + sum(total);
  }
}

// Adds a part that comes next to a row's sums.
inline void merge(Sums to, int64_t r, float peak, float total, const float* out, int64_t width) {
  float most = std::max(to.peak[r], peak);
  float before = power_of_2(to.peak[r] - most), after = power_of_2(peak - most);
  to.total[r] = to.total[r] * before;
  to.total[r] = to.total[r] + total * after;
  float* sums = to.out + r * width;
  for (int64_t i = 0; i < width; i += W) {
    store(sums + i, fma(load(out + i), set(after), load(sums + i) * set(before)));
  }
  to.peak[r] = most;
}

}  // namespace tsjax::attention
