// SPDX-License-Identifier: Apache-2.0
// Products of rows with narrow weights on a CPU: each weight is read once, for all rows of a tile.
//
// A vector has W outputs of a panel. A sum takes group after group: what the entries of a group
// times its integers add up to, times its scale, by fma(); then the least times the sum of the
// entries. Of rows of bfloat16 these are sums of integers, exact in any order; of float32, of floats
// in the order of the inputs. So a row has the same bits whatever other rows there are.

#include "../native/call.h"
#include "../native/rows.h"
#include "../native/tasks.h"
#include "words.h"

namespace tsjax::narrow {

constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications
constexpr int64_t NEAR = 1 << 18;           // bytes of a block, which stays near the core
constexpr int64_t MOST = REGISTERS == 32 ? 12 : 6;  // vectors of sums, beside as many of a group
constexpr int64_t PANEL = 16;  // as in matrix.py, as are the two below
constexpr int64_t WIDE = 256;
constexpr int HALF = 16;  // of the larger groups; the smaller are of one
constexpr int ENTRIES = 32;
constexpr float TINY = 0x1p-100f;  // entries below it are multiplied as zeros

inline int64_t pieces(int64_t size, int64_t of) { return (size + of - 1) / of; }

// A number of each group: stored as such, or as steps of a wide one that 256 inputs share.
struct Levels {
  const half* numbers;
  const int8_t* steps;
};

struct Matrix {
  const uint8_t* values;
  Levels scales, least;
  int64_t panels, groups, numbers;  // numbers of an output: as many as groups, or fewer
  int64_t group;
  int32_t zero;
};

// W outputs: a part of a panel.
struct Column {
  int64_t panel, part;
};

// A number of each of `count` groups, which begin 256 inputs: W floats each.
[[gnu::noinline]] void widen(const Matrix& matrix, const Levels& levels, Column of, int64_t group,
                             int64_t count, float* to) {
  if (!levels.numbers) return;
  const int64_t number = levels.steps ? group * matrix.group / WIDE : group;
  const half* numbers = levels.numbers + (of.panel * matrix.numbers + number) * PANEL + of.part;
  if (!levels.steps) {
    for (int64_t g = 0; g < count; g++) store(to + g * W, load(numbers + g * PANEL));
    return;
  }
  const Vector wide = load(numbers);
  const int8_t* steps = levels.steps + (of.panel * matrix.groups + group) * PANEL + of.part;
  for (int64_t g = 0; g < count; g++) store(to + g * W, wide * load(steps + g * PANEL));
}

union Word {
  int32_t integer;  // or four bytes
  float number;
};

// Rows of a tile as they are multiplied: of each group its words, each for all R rows.
template <class T>
struct Packed;

template <>
struct Packed<bfloat16> {
  using Sums = Words;
  static constexpr int64_t MOST_ROWS = MOST;

  // The bytes of four inputs after four, what the sum begins with, the scale of the entries, and
  // this times the sum of the integers.
  static constexpr int64_t words(int64_t group) { return group / 4 + 3; }
  static constexpr int64_t AFTER_HALF = HALF / 4;

  static void take(const float* entries, const Matrix& matrix, int64_t R, Word* to) {
    int8_t integers[ENTRIES] = {};
    float most = 0.0f, bad = 0.0f;
    for (int i = 0; i < ENTRIES; i++) most = std::max(most, std::abs(entries[i]));
    for (int i = 0; i < ENTRIES; i++) bad += entries[i] * 0.0f;  // NaN if one is not finite
    const float step = most > TINY ? 127.0f / most : 0.0f, scale = most / 127.0f + bad;
    for (int i = 0; bad == 0.0f && i < ENTRIES; i++) integers[i] = std::nearbyint(entries[i] * step);
    for (int first = 0; first < ENTRIES; first += matrix.group) {
      int32_t total = 0;
      for (int i = first; i < first + matrix.group; i++) total += integers[i];
      for (int i = first; i < first + matrix.group; i += 4, to += R) std::memcpy(to, integers + i, 4);
      to[0].integer = -matrix.zero * total;
      to[R].number = scale;
      to[2 * R].number = scale * total;
      to += 3 * R;
    }
  }

  // Of a row whose group's entries lie before.
  static Sums first(const Word* after) { return set(after->integer); }
  static Vector scaled(Sums sums, Vector scale, const Word* after, int64_t R, Vector total) {
    return fma(to_floats(sums), scale * set(after[R].number), total);
  }
  static float sum(const Word* after, int64_t R) { return after[2 * R].number; }

  template <int BITS, int R, int V>
  static void add(Words bytes, const Word* row, int four, int32_t, int v, Sums (&sums)[V][R]) {
    UNROLLED for (int r = 0; r < R; r++) {
      sums[v][r] = add_dots<BITS>(bytes, set(row[four * R + r].integer), sums[v][r]);
    }
  }
};

template <>
struct Packed<float> {
  using Sums = Vector;
  static constexpr int64_t MOST_ROWS = MOST / 2;

  // The entries and their sum.
  static constexpr int64_t words(int64_t group) { return group + 1; }
  static constexpr int64_t AFTER_HALF = HALF;

  static void take(const float* entries, const Matrix& matrix, int64_t R, Word* to) {
    for (int first = 0; first < ENTRIES; first += matrix.group, to += R) {
      float total = 0.0f;
      for (int i = first; i < first + matrix.group; i++, to += R) total += to->number = entries[i];
      to->number = total;
    }
  }

  static Sums first(const Word*) { return set(0.0f); }
  static Vector scaled(Sums sums, Vector scale, const Word*, int64_t, Vector total) {
    return fma(sums, scale, total);
  }
  static float sum(const Word* after, int64_t) { return after->number; }

  template <int BITS, int R, int V>
  static void add(Words bytes, const Word* row, int four, int32_t zero, int v, Sums (&sums)[V][R]) {
    auto add_one = [&](Words integers, int i) {
      const Vector weight = to_floats(integers) - set(static_cast<float>(zero));
      UNROLLED for (int r = 0; r < R; r++) {
        sums[v][r] = fma(weight, set(row[(4 * four + i) * R + r].number), sums[v][r]);
      }
    };
    add_one(byte_of<0>(bytes), 0);
    add_one(byte_of<1>(bytes), 1);
    add_one(byte_of<2>(bytes), 2);
    add_one(byte_of<3>(bytes), 3);
  }
};

// The vectors of a tile with R rows: a panel's or two panels', or some of a panel's. More panels at a
// time would be more streams from memory than come by themselves, as each has up to five arrays.
constexpr int vectors_of(int64_t R) {
  int64_t vectors = std::max<int64_t>(2, PANEL / W);
  while (vectors > 1 && R * vectors > MOST) vectors /= 2;
  return vectors;
}

// out[places[r] * stride + ...] of R rows and V columns.
template <class T, int BITS, int R, int V>
void dot(const Word* rows, const Matrix& matrix, const Column (&columns)[V], float* out,
         const int64_t* places) {
  using Rows = Packed<T>;
  constexpr int64_t BYTES = PANEL * HALF * (BITS == 8 ? 8 : 4) / 8;  // of half a group
  const int64_t group = matrix.group, groups = matrix.groups, after = Rows::words(group) - Rows::words(0);
  const int64_t size = PANEL * group * BITS / 8, plane = PANEL * group / 8;  // bytes of a group
  const bool with_least = matrix.least.numbers;
  alignas(64) float scales[V][WIDE / HALF * W], least[V][WIDE / HALF * W];
  const uint8_t* values[V];
  Vector totals[V][R];
  UNROLLED for (int v = 0; v < V; v++) {
    values[v] = matrix.values + columns[v].panel * groups * size;
    UNROLLED for (int r = 0; r < R; r++) totals[v][r] = set(0.0f);
  }
  for (int64_t first = 0; first < groups; first += WIDE / group) {
    const int64_t count = std::min(groups - first, WIDE / group);
    for (int v = 0; v < V; v++) {
      widen(matrix, matrix.scales, columns[v], first, count, scales[v]);
      widen(matrix, matrix.least, columns[v], first, count, least[v]);
    }
    for (int64_t g = 0; g < count; g++) {
      typename Rows::Sums sums[V][R];
      UNROLLED for (int v = 0; v < V; v++)
        UNROLLED for (int r = 0; r < R; r++) sums[v][r] = Rows::first(rows + after * R + r);
      for (int64_t half = 0; half < group / HALF; half++, rows += R * Rows::AFTER_HALF) {
        UNROLLED for (int i = 0; i < BYTES / (4 * PANEL); i++) {
          UNROLLED for (int v = 0; v < V; v++) {
            const uint8_t* from = values[v] + half * BYTES + i * 4 * PANEL;
            const Words bytes = load_words(from + 4 * columns[v].part);
            if constexpr (BITS == 8) {
              Rows::template add<BITS>(bytes, rows, i, matrix.zero, v, sums);
            } else {
              // Of further bits the one of each, 16 bytes for the two vectors.
              const uint8_t* bits = values[v] + PANEL * group / 2 + (half * BYTES / 64 + i) * PANEL;
              Words low = low_fours(bytes), high = high_fours(bytes);
              UNROLLED for (int bit = 4; bit < BITS; bit++, bits += plane) {
                low = with_bits(low, bits + columns[v].part / 2, 1 << bit);
                high = with_bits(high, bits + (PANEL + columns[v].part) / 2, 1 << bit);
              }
              Rows::template add<BITS>(low, rows, 2 * i, matrix.zero, v, sums);
              Rows::template add<BITS>(high, rows, 2 * i + 1, matrix.zero, v, sums);
            }
          }
        }
      }
      UNROLLED for (int v = 0; v < V; v++) values[v] += size;
      UNROLLED for (int v = 0; v < V; v++) {
        const Vector scale = load(scales[v] + g * W);
        UNROLLED for (int r = 0; r < R; r++) {
          totals[v][r] = Rows::scaled(sums[v][r], scale, rows + r, R, totals[v][r]);
        }
      }
      if (with_least) {
        UNROLLED for (int v = 0; v < V; v++)
          UNROLLED for (int r = 0; r < R; r++) {
            totals[v][r] = fma(load(least[v] + g * W), set(Rows::sum(rows + r, R)), totals[v][r]);
          }
      }
      rows += R * Rows::words(0);
    }
  }
  UNROLLED for (int v = 0; v < V; v++)
    UNROLLED for (int r = 0; r < R; r++) {
      const int64_t output = columns[v].panel * PANEL + columns[v].part;
      store(out + places[r] * matrix.panels * PANEL + output, totals[v][r]);
    }
}

// All rows, packed in tiles, with some panels. Those computed at a time lie apart in memory: a core
// reads a few long streams faster than many short ones.
template <class T, int BITS>
void dot_all(const Word* packed, const Matrix& matrix, const int64_t* places, int64_t rows,
             int64_t first, int64_t count, float* out) {
  constexpr int64_t MOST_ROWS = Packed<T>::MOST_ROWS;
  const int64_t tile = tile_of(rows, MOST_ROWS);
  const int64_t size = matrix.groups * Packed<T>::words(matrix.group);
  for (int64_t r = 0; r < rows; r += tile) {
    for_number<MOST_ROWS>(std::min(tile, rows - r), [&](auto R) {
      constexpr int V = vectors_of(R), P = std::max<int>(1, V * W / PANEL);
      const int64_t apart = pieces(count, P);
      for (int64_t i = 0; i < apart; i++) {
        for (int64_t part = 0; part < PANEL; part += V / P * W) {
          Column columns[V];  // the last ones may be the same
          for (int v = 0; v < V; v++) {
            const int64_t panel = std::min(i + v * P / V * apart, count - 1);
            columns[v] = {first + panel, part + v % (V / P) * W};
          }
          dot<T, BITS, R>(packed + r * size, matrix, columns, out, places + r);
        }
      }
    });
  }
}

template <class T>
struct Arrays {
  const T* rows;
  float* out;
  int64_t R, I;
  Live live;
};

// Rows side by side, zeros after their end.
template <class T>
void pack(const Arrays<T>& arrays, const int64_t* places, int64_t R, const Matrix& matrix, Word* to) {
  const int64_t size = ENTRIES / matrix.group * Packed<T>::words(matrix.group);
  for (int64_t r = 0; r < R; r++) {
    const T* row = arrays.rows + places[r] * arrays.I;
    for (int64_t i = 0; i < matrix.groups * matrix.group; i += ENTRIES) {
      float entries[ENTRIES];
      for (int j = 0; j < ENTRIES; j++) entries[j] = i + j < arrays.I ? to_float(row[i + j]) : 0.0f;
      Packed<T>::take(entries, matrix, R, to + i / ENTRIES * size * R + r);
    }
  }
}

template <class T, int BITS, class Pool>
void multiply(Pool& pool, const Arrays<T>& arrays, const Matrix& matrix) {
  // This thread's until the last task is done, as are the packed rows.
  int64_t* places = scratch<2, int64_t>(arrays.R);
  int64_t R = 0;
  for (int64_t r = 0; r < arrays.R; r++)
    if (arrays.live.has(r)) places[R++] = r;
  const int64_t tile = R ? tile_of(R, Packed<T>::MOST_ROWS) : 1;
  const int64_t I = matrix.groups * matrix.group;
  const int64_t size = matrix.groups * Packed<T>::words(matrix.group);
  Word* packed = scratch<1, Word>(R * size);
  run_tasks(pool, pieces(R, tile), R * I > WORTH_SHARING, [=](int64_t task) {
    const int64_t r = task * tile;
    pack<T>(arrays, places + r, std::min(tile, R - r), matrix, packed + r * size);
  });
  // Blocks of panels, so that rows after the first tile find their weights near.
  const int64_t near = std::max<int64_t>(1, NEAR * 8 / (PANEL * I * BITS));
  const int64_t share = pieces(matrix.panels, 4 * pool.num_threads());
  const int64_t block = R > tile ? std::min(near, share) : share;
  auto work = [=](int64_t task) {
    const int64_t first = task * block, count = std::min(block, matrix.panels - first);
    const int64_t stride = matrix.panels * PANEL;
    for (int64_t r = 0; R < arrays.R && r < arrays.R; r++) {
      if (arrays.live.has(r)) continue;
      std::fill_n(arrays.out + r * stride + first * PANEL, count * PANEL, 0.0f);
    }
    if (R) dot_all<T, BITS>(packed, matrix, places, R, first, count, arrays.out);
  };
  run_tasks(pool, pieces(matrix.panels, block), R * matrix.panels * PANEL * I > WORTH_SHARING, std::move(work));
}

template <class T>
void run(const Call& call) {
  const Array rows = call.argument(0), values = call.argument(1), scales = call.argument(2);
  auto levels = [&](int i) -> Levels {
    return {call.argument(i).data<half>(), call.argument(i + 1).data<int8_t>()};
  };
  const Matrix matrix{values.data<uint8_t>(), levels(2), levels(4), values.dim(0), values.dim(1),
                      scales.dim(1), call.attribute<int64_t>(1),
                      static_cast<int32_t>(call.attribute<int64_t>(2))};
  const int64_t I = rows.last();
  const Arrays<T> arrays{rows.data<T>(), call.result(0).data<float>(), rows.size() / I, I,
                         live_of(call.argument(6), rows)};
  switch (call.attribute<int64_t>(0)) {
    case 4: return multiply<T, 4>(call, arrays, matrix);
    case 5: return multiply<T, 5>(call, arrays, matrix);
    case 6: return multiply<T, 6>(call, arrays, matrix);
    default: return multiply<T, 8>(call, arrays, matrix);
  }
}

}  // namespace tsjax::narrow

// Rows, values, scales and steps, least and its steps, live; bits, group and zero; the products.
extern "C" XLA_FFI_Error* tsjax_narrow_product(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 7, .results = 1, .attributes = 3}, [](const Call& call) {
    call.argument(0).is<float>() ? narrow::run<float>(call) : narrow::run<bfloat16>(call);
  });
}
