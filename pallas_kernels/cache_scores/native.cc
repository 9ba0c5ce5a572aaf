// SPDX-License-Identifier: Apache-2.0
// Scores of committed slots on a CPU: each key is read once for the query heads that share it, and
// once more where the totals of a softmax are not given.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"

namespace tsjax::scores {

constexpr int64_t PART = 1024;     // slots of a task
constexpr float NOTHING = -1e30f;  // the peak of nothing: finite, so that no inf - inf arises
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t WORTH_SHARING = 1 << 16;  // multiplications

template <class T>
struct Arrays {
  const T* q;
  Stored<T> k_cache;
  const int32_t* length;
  int64_t B, N, K, S, H;

  int64_t G() const { return N / K; }
  int64_t committed(int64_t b) const { return std::clamp<int64_t>(length[b], 0, S); }
  int64_t parts() const { return (S + PART - 1) / PART; }
};

// use(slot, scores) for each block of a task's part: scores[g * BLOCK + i] is the product of the
// head's query g and the key of slot + i, times `scale`. Slots beyond the length are ABSENT.
template <class T, class Use>
void for_blocks(const Arrays<T>& arrays, int64_t head, int64_t part, float scale, Use use) {
  const int64_t H = arrays.H, G = arrays.G(), b = head / arrays.K, k = head % arrays.K;
  const int64_t width = padded(H);
  float* q = scratch<0>(G * width + BLOCK * width + G * BLOCK + BLOCK);
  float *copy = q + G * width, *scores = copy + BLOCK * width, *powers = scores + G * BLOCK;
  as_floats(arrays.q + (b * arrays.N + k * G) * H, H, G, H, width, q);
  for (int64_t i = 0; i < G * width; i++) q[i] = q[i] * scale;
  const Stored<T>& cache = arrays.k_cache;
  const bool numbers_first = width == H && cache.is_narrow() && are_moderate(q, G * width);
  auto score_all = [&](const auto* keys, int64_t slots, Next next) {
    const int64_t tile = tile_of(G, MOST_ROWS);
    for (int64_t g = 0, R; g < G; g += R) {
      R = std::min(tile, G - g);
      score_rows(R, q + g * width, keys, slots, width, scores + g * BLOCK, int64_t{BLOCK},
                 g ? Next() : next);
    }
  };
  const int64_t end = std::min((part + 1) * PART, arrays.committed(b));
  for (int64_t slot = part * PART; slot < end; slot += BLOCK) {
    const int64_t slots = std::min<int64_t>(BLOCK, end - slot);
    const int64_t row = head * arrays.S + slot;
    const bool whole = slots == BLOCK;
    if (whole && numbers_first && cache.powers(row, 1.0f, powers)) {
      score_all(cache.numbers + row * H, slots, cache.from(row + BLOCK, H));
      times_powers(scores, G, powers);
    } else if (whole && width == H && !cache.is_narrow()) {  // read where they lie
      score_all(cache.wide + row * H, slots, cache.from(row + BLOCK, H));
    } else {
      if (cache.is_narrow()) {
        cache.widen(row, slots, H, width, copy);
      } else {
        as_floats(cache.wide + row * H, H, slots, H, width, copy);
      }
      std::fill(copy + slots * width, copy + BLOCK * width, 0.0f);
      score_all(static_cast<const float*>(copy), int64_t{BLOCK}, Next());
    }
    for (int64_t g = 0; g < G; g++) {
      std::fill(scores + g * BLOCK + slots, scores + (g + 1) * BLOCK, ABSENT);
    }
    use(slot, scores);
  }
}

// The sum of each slot's `values` [G, BLOCK] over the queries, in order, for the slots of a part.
void add_up(const float* values, int64_t G, int64_t slots, float* to) {
  for (int64_t i = 0; i < slots; i++) {
    float total = values[i];
    for (int64_t g = 1; g < G; g++) total = total + values[g * BLOCK + i];
    to[i] = total;
  }
}

template <class T, class Pool>
void score(Pool& pool, const Arrays<T>& arrays, bool softmax, const float* log_totals,
           float* out) {
  const int64_t G = arrays.G(), parts = arrays.parts(), heads = arrays.B * arrays.K;
  const bool worth_sharing = heads * arrays.S * G * arrays.H > WORTH_SHARING;
  const float scale = softmax ? LOG2_E / std::sqrt(static_cast<float>(arrays.H)) : 1.0f;
  const int64_t rows = heads * G;
  auto totals = std::make_shared<std::vector<float>>(softmax ? rows : 0);  // to base 2
  if (log_totals) {
    for (int64_t r = 0; softmax && r < rows; r++) (*totals)[r] = log_totals[r] * LOG2_E;
  } else if (softmax) {
    auto sums = std::make_shared<std::vector<float>>(2 * rows * parts);  // [peak, total][parts][rows]
    run_tasks(pool, heads * parts, worth_sharing, [=](int64_t i) {
      const int64_t head = i / parts, part = i % parts;
      float *peaks = sums->data() + part * rows + head * G, *added = peaks + rows * parts;
      std::fill(peaks, peaks + G, NOTHING);
      std::fill(added, added + G, 0.0f);
      for_blocks(arrays, head, part, scale, [&](int64_t, const float* scores) {
        for (int64_t g = 0; g < G; g++) {
          const float* block = scores + g * BLOCK;
          Vector most = load(block), total = set(0.0f);
          for (int j = W; j < BLOCK; j += W) most = max(most, load(block + j));
          float peak = std::max(peaks[g], largest(most));
          for (int j = 0; j < BLOCK; j += W) total = total + power_of_2(load(block + j) - set(peak));
          added[g] = added[g] * power_of_2(peaks[g] - peak);
          added[g] = added[g] + sum(total);
          peaks[g] = peak;
        }
      });
    });
    for (int64_t r = 0; r < rows; r++) {
      const float *peaks = sums->data() + r, *added = peaks + rows * parts;
      float peak = NOTHING, total = 0.0f;
      for (int64_t p = 0; p < parts; p++) peak = std::max(peak, peaks[p * rows]);
      for (int64_t p = 0; p < parts; p++) {
        total = total + added[p * rows] * power_of_2(peaks[p * rows] - peak);
      }
      (*totals)[r] = peak + std::log2(total);
    }
  }
  run_tasks(pool, heads * parts, worth_sharing, [=](int64_t i) {
    const int64_t head = i / parts, part = i % parts, b = head / arrays.K;
    for_blocks(arrays, head, part, scale, [&](int64_t slot, float* scores) {
      for (int64_t g = 0; softmax && g < G; g++) {
        for (int j = 0; j < BLOCK; j += W) {
          float* at = scores + g * BLOCK + j;
          store(at, power_of_2(load(at) - set((*totals)[head * G + g])));
        }
      }
      int64_t slots = std::min<int64_t>(BLOCK, arrays.committed(b) - slot);
      add_up(scores, G, slots, out + head * arrays.S + slot);
    });
    const int64_t first = std::max(part * PART, arrays.committed(b));
    const int64_t end = std::min((part + 1) * PART, arrays.S);
    for (int64_t s = first; s < end; s++) out[head * arrays.S + s] = softmax ? 0.0f : ABSENT;
  });
}

template <class T>
void run(const Call& call) {
  const Array q = call.argument(0), k_cache = call.argument(1);
  Arrays<T> arrays{q.data<T>(), cache_of<T>(k_cache, call.argument(4)), call.argument(2).data<int32_t>(),
                   q.dim(0), q.dim(1), k_cache.dim(1), k_cache.dim(2), q.dim(2)};
  score(call, arrays, call.attribute<bool>(0), call.argument(3).data<float>(),
        call.result(0).data<float>());
}

}  // namespace tsjax::scores

// q_last, k_cache, length, log_totals, exponents of k_cache; scores. Attribute: softmax.
extern "C" XLA_FFI_Error* tsjax_cache_scores(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 5, .results = 1, .attributes = 1}, [](const Call& call) {
    call.argument(0).is<float>() ? scores::run<float>(call) : scores::run<bfloat16>(call);
  });
}
