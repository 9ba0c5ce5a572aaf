// SPDX-License-Identifier: Apache-2.0
// Attention on a CPU: each row sums what it sees in one order, whoever runs beside it.
//
// What a row sees are the committed slots and after them, as if they were committed, the fresh rows
// that the mask lets it see, in their order. These places are cut into blocks of 64 and parts of
// 1024. In a block: the scores, each added up as rows.h says; the new peak; the weights; their sum;
// then the values, place by place. Blocks follow one another in a part, and the parts are merged in
// order. So a row has the same bits in any batch, beside any rows, and whether a token that it sees is
// cached or fresh. A place with the score -inf changes nothing, as if it were not there.
//
// Numbers are multiplied as floats; those of bfloat16 in pairs, where the processor does that
// (pairs.h); those of narrow rows before their powers of two. T * G rows share a kv head, and each block
// of the cache is read once for GROUP of them. Tasks are
// parts where rows are few, and groups of rows, with all their parts, where there are many.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"
#include "sums.h"

namespace tsjax::attention {

constexpr int64_t PART = 1024, GROUP = 96;
constexpr int64_t WORTH_TURNING = 256;  // numbers of a key, squared, for each row that reads it
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;
constexpr int64_t WORTH_SHARING = 1 << 16;  // multiplications

// The arrays as api.py describes them, and their sizes.
template <class T>
struct Arrays {
  const T* q;
  Stored<T> k_cache, v_cache;
  const T *k_new, *v_new;
  const int32_t* length;
  const bool* mask;
  const T* mean;  // nullptr without `rest`
  const float* log_total;
  const int32_t *slot_ranks, *row_ranks;  // nullptr without `ranks`
  const int32_t* live;                    // nullptr where all fresh rows are wanted
  T* out;
  float* log_totals;
  int64_t B, rows_T, N, K, S, H;

  int64_t G() const { return N / K; }
  int64_t committed(int64_t b) const { return std::clamp<int64_t>(length[b], 0, S); }
  int64_t wanted(int64_t b) const { return live ? std::clamp<int64_t>(live[b], 0, rows_T) : rows_T; }
  int64_t parts(int64_t b) const { return (committed(b) + rows_T - 1) / PART + 1; }
  // Row r of a kv head is the query head r % G of the fresh row r / G.
  int64_t query(int64_t b, int64_t k, int64_t r) const {
    return (b * rows_T + r / G()) * N + k * G() + r % G();
  }
};

// Which fresh rows each of the fresh rows of a group sees: of these the first `reach`, and at most so
// many.
struct Seen {
  std::vector<std::vector<int32_t>> by_row;
  int64_t reach = 0, most = 0;
};

// Some rows of one kv head: what they may see, and where it lies.
template <class T>
struct Rows {
  const Arrays<T>& arrays;
  int64_t b, k, first, rows;  // rows first .. first + rows of T * G
  int64_t H, committed;
  int32_t highest_rank;  // of the rows

  Rows(const Arrays<T>& arrays, int64_t b, int64_t k, int64_t first)
      : arrays(arrays), b(b), k(k), first(first), H(arrays.H) {
    rows = std::clamp<int64_t>(arrays.wanted(b) * arrays.G() - first, 0, GROUP);
    committed = arrays.committed(b);
    if (arrays.slot_ranks && rows) {
      const int32_t* ranks = arrays.row_ranks + b * arrays.rows_T;
      int64_t last = (first + rows - 1) / arrays.G();
      highest_rank = *std::max_element(ranks + first / arrays.G(), ranks + last + 1);
    }
  }

  int64_t fresh_row(int64_t r) const { return (first + r) / arrays.G(); }
  const T* query(int64_t r) const { return arrays.q + arrays.query(b, k, first + r) * H; }
  int64_t row_of(int64_t slot) const { return (b * arrays.K + k) * arrays.S + slot; }
  const T* cached(const Stored<T>& cache, int64_t slot) const { return cache.wide + row_of(slot) * H; }
  const T* fresh(const T* rows, int64_t t) const {
    return rows + ((b * arrays.rows_T + t) * arrays.K + k) * H;
  }
  int64_t fresh_stride() const { return arrays.K * H; }

  // The block after this one of keys or values.
  Next after(const Stored<T>& cache, int64_t slot) const {
    return slot + 2 * BLOCK > committed ? Next() : cache.from(row_of(slot + BLOCK), H);
  }

  int32_t rank(int64_t r) const { return arrays.row_ranks[b * arrays.rows_T + fresh_row(r)]; }
  const int32_t* ranks_of(int64_t slot) const { return arrays.slot_ranks + b * arrays.S + slot; }
  bool sees(int64_t r, int64_t slot) const { return !arrays.slot_ranks || *ranks_of(slot) < rank(r); }

  // Whether any row may see a slot of a block.
  bool sees_some(int64_t slot) const {
    return !arrays.slot_ranks || extreme(slot, [](int32_t a, int32_t b) { return std::min(a, b); }) < highest_rank;
  }
  // Takes from the scores of R rows, which begin with r, what they do not see of a block.
  void hide(float* scores, int64_t r, int64_t R, int64_t slot) const {
    if (!arrays.slot_ranks) return;
    const int32_t* ranks = ranks_of(slot);
    const int32_t all_see = extreme(slot, [](int32_t a, int32_t b) { return std::max(a, b); });
    for (int64_t i = 0; i < R; i++, scores += BLOCK) {
      const int32_t mine = rank(r + i);
      if (mine > all_see) continue;
      for (int j = 0; j < BLOCK; j++) scores[j] = ranks[j] < mine ? scores[j] : ABSENT;
    }
  }

  Seen seen() const {
    Seen seen;
    for (int64_t t = fresh_row(0); t <= fresh_row(rows - 1); t++) {
      const bool* mask = arrays.mask + (b * arrays.rows_T + t) * arrays.rows_T;
      auto& of_row = seen.by_row.emplace_back();
      for (int64_t u = 0; u < arrays.rows_T; u++)
        if (mask[u]) of_row.push_back(static_cast<int32_t>(u));
      if (!of_row.empty()) seen.reach = std::max<int64_t>(seen.reach, of_row.back() + 1);
      seen.most = std::max<int64_t>(seen.most, of_row.size());
    }
    return seen;
  }

  // Adds `rest` to the sums of row r, and writes its results.
  void write(Sums sums, int64_t r, int64_t width, float* mean) const {
    int64_t query = arrays.query(b, k, first + r);
    if (arrays.mean) {
      int64_t head = b * arrays.N + k * arrays.G() + (first + r) % arrays.G();
      for (int64_t h = 0; h < width; h++) mean[h] = h < H ? to_float(arrays.mean[head * H + h]) : 0.0f;
      merge(sums, r, arrays.log_total[head] * LOG2_E, 1.0f, mean, width);
    }
    float total = sums.total[r];
    for (int64_t h = 0; h < H; h++) {
      from_float(sums.out[r * width + h] / total, arrays.out + query * H + h);
    }
    arrays.log_totals[query] = (sums.peak[r] + std::log2(total)) * LN_2;
  }

  // Zeros for the rows of the group that nobody wants, which come last.
  void write_unwanted() const {
    for (int64_t r = rows; r < std::min(GROUP, arrays.rows_T * arrays.G() - first); r++) {
      const int64_t query = arrays.query(b, k, first + r);
      std::fill_n(arrays.out + query * H, H, T{});
      arrays.log_totals[query] = 0.0f;
    }
  }

 private:
  template <class Choice>
  int32_t extreme(int64_t slot, Choice choice) const {
    const int32_t* ranks = ranks_of(slot);
    int32_t found = ranks[0];
    for (int j = 1; j < BLOCK; j++) found = choice(found, ranks[j]);
    return found;
  }
};

// Rows that are multiplied as floats.
template <class T>
struct Group : Rows<T> {
  using Base = Rows<T>;
  using Base::arrays, Base::b, Base::k, Base::first, Base::rows, Base::H, Base::committed;
  using Base::cached, Base::row_of, Base::after, Base::sees;
  using Base::fresh, Base::fresh_stride, Base::fresh_row;
  int64_t width;
  bool numbers_first;  // of narrow rows; the powers of two later
  float *q, *keys, *values, *turned, *weights, *key_powers, *value_powers;

  static int64_t width_of(int64_t H) { return padded(H); }
  static int64_t memory(int64_t width) {
    return GROUP * width + 3 * BLOCK * width + (MOST_ROWS + 2) * BLOCK;
  }

  Group(const Arrays<T>& arrays, int64_t b, int64_t k, int64_t first, float* memory)
      : Base(arrays, b, k, first), width(width_of(arrays.H)) {
    q = memory, keys = q + GROUP * width, values = keys + BLOCK * width;
    turned = values + BLOCK * width, weights = turned + BLOCK * width;
    key_powers = weights + MOST_ROWS * BLOCK, value_powers = key_powers + BLOCK;
    float scale = LOG2_E / std::sqrt(static_cast<float>(H));
    for (int64_t r = 0; r < rows; r++) {
      const T* from = this->query(r);
      for (int64_t h = 0; h < width; h++) q[r * width + h] = h < H ? to_float(from[h]) * scale : 0.0f;
    }
    numbers_first = arrays.k_cache.is_narrow() && are_moderate(q, rows * width);
  }

  void copy(const Stored<T>& cache, int64_t slot, int64_t count, float* to) const {
    if (cache.is_narrow()) {
      cache.widen(row_of(slot), count, H, width, to);
    } else {
      as_floats(cached(cache, slot), H, count, H, width, to);
    }
  }

  // The blocks of a part that are full of committed slots.
  void add_whole_blocks(int64_t part, Sums sums) {
    int64_t end = std::min((part + 1) * PART, committed / BLOCK * BLOCK);
    for (int64_t slot = part * PART; slot < end; slot += BLOCK) {
      if (!this->sees_some(slot)) continue;
      const auto &k = arrays.k_cache, &v = arrays.v_cache;
      const int64_t row = row_of(slot);
      // Read where they lie, if that is possible and, for narrow types, if few rows read them.
      const bool few = width == H && rows <= MOST_ROWS;
      if (numbers_first && k.powers(row, 1.0f, key_powers) && v.powers(row, 1.0f, value_powers)) {
        const int8_t *numbers = k.numbers + row * H, *others = v.numbers + row * H;
        if (few) {
          add_block(numbers, others, slot, sums, true);
        } else {
          as_floats(numbers, H, BLOCK, H, width, keys);
          as_floats(others, H, BLOCK, H, width, values);
          add_block<float>(keys, values, slot, sums, true);
        }
      } else if (!k.is_narrow() && width == H && (std::is_same_v<T, float> || few)) {
        add_block(cached(k, slot), cached(v, slot), slot, sums);
      } else {
        copy(k, slot, BLOCK, keys);
        copy(v, slot, BLOCK, values);
        add_block<float>(keys, values, slot, sums);
      }
    }
  }

  // With `powers` the rows are without theirs, which are in key_powers and value_powers.
  template <class Number>
  void add_block(const Number* some_keys, const Number* some_values, int64_t slot, Sums sums,
                 bool powers = false) {
    Next next_keys = after(arrays.k_cache, slot), next_values = after(arrays.v_cache, slot);
    [[maybe_unused]] const bool turns = width * width <= rows * WORTH_TURNING;
#if defined(__AVX512F__)
    if (turns) turn_keys(some_keys, width, turned, next_keys);
#endif
    for (int64_t r = 0, R; r < rows; r += R) {
      R = std::min(MOST_ROWS, rows - r);
#if defined(__AVX512F__)
      if (turns) {
        turned_scores(R, q + r * width, turned, width, weights);
      } else
#endif
      {
        score_rows(R, q + r * width, some_keys, int64_t{BLOCK}, width, weights, int64_t{BLOCK},
                   r ? Next() : next_keys);
      }
      if (powers) times_powers(weights, R, key_powers);
      this->hide(weights, r, R, slot);
      weigh(weights, weights, sums, r, R, width, powers ? value_powers : nullptr);
      add_values(R, weights, int64_t{BLOCK}, some_values, int64_t{BLOCK}, sums.out + r * width, width,
                 r ? Next() : next_values);
    }
  }

  // The committed slots after the last full block, and the fresh rows: blocks differ from row to
  // row. `sums_of(part)` has the sums of a part, each asked for once the one before is done.
  template <class SumsOf>
  void add_tail(SumsOf sums_of) {
    const int64_t cached_slots = committed % BLOCK, start = committed - cached_slots;
    const auto seen = this->seen();
    const int64_t fresh_rows = seen.reach, most_places = cached_slots + seen.most;
    // All that any row of the group sees, in order; the scores of all rows with it.
    const int64_t all = cached_slots + fresh_rows, most = (all + BLOCK - 1) / BLOCK * BLOCK;
    float* memory = scratch<1>(rows * most + most * width + MOST_ROWS * most);
    float* scores = memory;
    float* floats = scores + rows * most;
    float* spread = floats + most * width;  // weights at the places of `floats`
    copy(arrays.v_cache, start, cached_slots, floats);
    as_floats(fresh(arrays.v_new, 0), fresh_stride(), fresh_rows, H, width,
              floats + cached_slots * width);
    for (int64_t place = 0; place < all; place += BLOCK) {
      int64_t from_cache = std::clamp<int64_t>(cached_slots - place, 0, BLOCK);
      int64_t from_fresh = std::min<int64_t>(BLOCK, all - place) - from_cache;
      if (from_cache) copy(arrays.k_cache, start + place, from_cache, keys);
      if (from_fresh) {
        const T* rows = fresh(arrays.k_new, place + from_cache - cached_slots);
        as_floats(rows, fresh_stride(), from_fresh, H, width, keys + from_cache * width);
      }
      const int64_t filled = from_cache + from_fresh, slots = (filled + SLOTS - 1) / SLOTS * SLOTS;
      std::fill(keys + filled * width, keys + slots * width, 0.0f);
      for (int64_t r = 0, R; r < rows; r += R) {
        R = std::min(MOST_ROWS, rows - r);
        score_rows(R, q + r * width, static_cast<const float*>(keys), slots, width,
                   scores + r * most + place, most, Next());
      }
    }
    for (int64_t place = 0; place < most_places; place += BLOCK) {
      Sums sums = sums_of((start + place) / PART);
      for (int64_t r = 0, R; r < rows; r += R) {
        R = std::min(MOST_ROWS, rows - r);
        int64_t low = all, high = 0;
        int64_t where[MOST_ROWS][BLOCK];
        int count[MOST_ROWS];
        for (int64_t i = 0; i < R; i++) {
          const auto& of_row = seen.by_row[fresh_row(r + i) - fresh_row(0)];
          int64_t places = cached_slots + static_cast<int64_t>(of_row.size());
          count[i] = static_cast<int>(std::clamp<int64_t>(places - place, 0, BLOCK));
          for (int j = 0; j < count[i]; j++) {
            int64_t at = place + j;
            where[i][j] = at < cached_slots ? at : cached_slots + of_row[at - cached_slots];
          }
          if (count[i]) {
            low = std::min(low, where[i][0]);
            high = std::max(high, where[i][count[i] - 1] + 1);
          }
        }
        if (low >= high) continue;
        for (int64_t i = 0; i < R; i++) {
          float block[BLOCK];
          for (int j = 0; j < BLOCK; j++) {
            bool visible = j < count[i];
            if (visible && where[i][j] < cached_slots) visible = sees(r + i, start + where[i][j]);
            block[j] = visible ? scores[(r + i) * most + where[i][j]] : ABSENT;
          }
          weigh(block, block, sums, r + i, 1, width);
          float* to = spread + i * most;
          std::fill(to + low, to + high, 0.0f);
          for (int j = 0; j < count[i]; j++) to[where[i][j]] = block[j];
        }
        add_values(R, spread + low, most, static_cast<const float*>(floats + low * width),
                   high - low, sums.out + r * width, width, Next());
      }
    }
  }

  void finish(Sums sums) {
    std::vector<float> mean(width);
    for (int64_t r = 0; r < rows; r++) this->write(sums, r, width, mean.data());
  }
};

}  // namespace tsjax::attention

#include "pairs.h"

namespace tsjax::attention {

template <class T, class Pool>
void attend(Pool& pool, const Arrays<T>& arrays) {
  using Group = GroupOf<T>;
  const int64_t H = arrays.H, width = Group::width_of(H), rows = arrays.rows_T * arrays.G();
  const int64_t groups = (rows + GROUP - 1) / GROUP, heads = arrays.B * arrays.K;
  int64_t most_parts = 0, pairs = 0;
  for (int64_t b = 0; b < arrays.B; b++) {
    most_parts = std::max(most_parts, arrays.parts(b));
    pairs += (arrays.committed(b) + arrays.rows_T) * arrays.wanted(b) * arrays.G();
  }
  const bool worth_sharing = pairs * arrays.K * H > WORTH_SHARING;

  if (most_parts == 1 || heads * groups >= 8 * pool.num_threads()) {  // all parts in one task
    run_tasks(pool, heads * groups, worth_sharing, [arrays, groups, width](int64_t i) {
      const int64_t own = Group::memory(width), sums_size = Sums::size(GROUP, width);
      float* memory = scratch<0>(own + 2 * sums_size);
      Group group(arrays, i / groups / arrays.K, i / groups % arrays.K, i % groups * GROUP, memory);
      group.write_unwanted();
      if (!group.rows) return;
      Sums merged(memory + own, GROUP), sums(memory + own + sums_size, GROUP);
      merged.clear(group.rows, width);
      int64_t part = 0, last = group.committed / BLOCK * BLOCK / PART;
      sums.clear(group.rows, width);
      auto next = [&](int64_t wanted) {
        for (; part < wanted; part++) {
          for (int64_t r = 0; r < group.rows; r++) {
            merge(merged, r, sums.peak[r], sums.total[r], sums.out + r * width, width);
          }
          sums.clear(group.rows, width);
        }
        return sums;
      };
      for (int64_t p = 0; p <= last; p++) group.add_whole_blocks(p, next(p));
      group.add_tail(next);
      next(part + 1);
      group.finish(merged);
    });
    return;
  }

  // One task for each part; the last of a group's tasks merges them.
  struct Parts {
    std::unique_ptr<float[]> sums;  // each task clears its own
    std::vector<std::atomic<int32_t>> left;
    Parts(int64_t floats, int64_t groups) : sums(new float[floats]), left(groups) {}
  };
  const int64_t most_rows = std::min(GROUP, rows), size = Sums::size(most_rows, width);
  auto parts = std::make_shared<Parts>(heads * groups * most_parts * size, heads * groups);
  for (int64_t i = 0; i < heads * groups; i++) {
    parts->left[i] = static_cast<int32_t>(arrays.parts(i / groups / arrays.K));
  }
  auto work = [arrays, parts, groups, most_parts, most_rows, size, width](int64_t i) {
    const int64_t group_index = i / most_parts, part = i % most_parts;
    const int64_t b = group_index / groups / arrays.K, k = group_index / groups % arrays.K;
    if (part >= arrays.parts(b)) return;
    const int64_t own = Group::memory(width);
    float* memory = scratch<0>(own + size);
    Group group(arrays, b, k, group_index % groups * GROUP, memory);
    if (part == 0) group.write_unwanted();
    if (!group.rows) return;
    float* all = parts->sums.get() + group_index * most_parts * size;
    auto sums_of = [&](int64_t p) { return Sums(all + p * size, most_rows); };
    const int64_t last = group.committed / BLOCK * BLOCK / PART;
    if (part < last) {
      sums_of(part).clear(group.rows, width);
      group.add_whole_blocks(part, sums_of(part));
    } else if (part == last) {  // and whatever the tail reaches
      for (int64_t p = last; p < arrays.parts(b); p++) sums_of(p).clear(group.rows, width);
      group.add_whole_blocks(part, sums_of(part));
      group.add_tail(sums_of);
    }
    if (parts->left[group_index].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Sums merged(memory + own, most_rows);
    merged.clear(group.rows, width);
    for (int64_t p = 0; p < arrays.parts(b); p++) {
      Sums one = sums_of(p);
      for (int64_t r = 0; r < group.rows; r++) {
        merge(merged, r, one.peak[r], one.total[r], one.out + r * width, width);
      }
    }
    group.finish(merged);
  };
  run_tasks(pool, heads * groups * most_parts, worth_sharing, std::move(work));
}

template <class T>
void run(const Call& call) {
  const Array q = call.argument(0), k_cache = call.argument(1), v_cache = call.argument(2);
  auto numbers = [&](int64_t i) { return call.argument(i).data<T>(); };
  auto integers = [&](int64_t i) { return call.argument(i).data<int32_t>(); };
  Arrays<T> arrays{
      numbers(0), cache_of<T>(k_cache, call.argument(11)), cache_of<T>(v_cache, call.argument(12)),
      numbers(4), numbers(5), integers(3), call.argument(6).data<bool>(), numbers(7),
      call.argument(8).data<float>(), integers(9), integers(10), integers(13), call.result(0).data<T>(), call.result(1).data<float>(),
      q.dim(0), q.dim(1), q.dim(2), k_cache.dim(1), k_cache.dim(2), q.dim(3)};
  attend(call, arrays);
}

}  // namespace tsjax::attention

// q, k_cache, v_cache, length, k_new, v_new, mask, mean, log_total, slot_ranks, row_ranks, exponents
// of k_cache and of v_cache, live; the sums and the totals' logarithms.
extern "C" XLA_FFI_Error* tsjax_tree_attention(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 14, .results = 2}, [](const Call& call) {
    call.argument(0).is<float>() ? attention::run<float>(call) : attention::run<bfloat16>(call);
  });
}
