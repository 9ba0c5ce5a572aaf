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
#include "packed.h"

namespace tsjax::narrow {

constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications
constexpr int64_t NEAR = 1 << 18;           // bytes of a block, which stays near the core
constexpr int64_t AHEAD = 2048;             // bytes from what is read to what is fetched
constexpr int64_t PANEL = 16, WIDE = 256;   // as in matrix.py

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

  int64_t inputs() const { return groups * group; }
};

// Words of a row that is packed.
template <class T>
int64_t packed_size(const Matrix& matrix) {
  return matrix.groups * (Packed<T>::words(matrix.group) + Packed<T>::MORE);
}

// W outputs of a panel, from one on.
struct Column {
  int64_t panel, from;
};

// A number of each of `count` groups, which begin 256 inputs: W floats each.
[[gnu::noinline]] inline void widen(const Matrix& matrix, const Levels& levels, Column of,
                                    int64_t group, int64_t count, float* to) {
  if (!levels.numbers) return;
  const int64_t number = levels.steps ? group * matrix.group / WIDE : group;
  const half* numbers = levels.numbers + (of.panel * matrix.numbers + number) * PANEL + of.from;
  if (!levels.steps) {
    for (int64_t g = 0; g < count; g++) store(to + g * W, load(numbers + g * PANEL));
    return;
  }
  const Vector wide = load(numbers);
  const int8_t* steps = levels.steps + (of.panel * matrix.groups + group) * PANEL + of.from;
  for (int64_t g = 0; g < count; g++) store(to + g * W, wide * load(steps + g * PANEL));
}

// The vectors of a tile with R rows: of two panels, of one, or of a part. More panels at a time would
// be more streams from memory than come by themselves, as each has up to five arrays.
constexpr int vectors_of(int64_t R) {
  int64_t vectors = 2 * PANEL / W;
  while (vectors > 1 && R * vectors > MOST) vectors /= 2;
  return vectors;
}

// The products of R rows with V columns; those of row r belong to row places[r] of `out`.
template <class T, int BITS, int R, int V>
void dot(const Word* rows, const Matrix& matrix, const Column (&columns)[V], float* out,
         const int64_t* places) {
  using Rows = Packed<T>;
  constexpr int64_t BYTES = PANEL * HALF / (BITS == 8 ? 1 : 2);  // of half a group
  const int64_t group = matrix.group, groups = matrix.groups;
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
      const Word* after = rows + Rows::words(group) * R;
      UNROLLED for (int v = 0; v < V; v++)
        UNROLLED for (int r = 0; r < R; r++) sums[v][r] = Rows::first(after + r);
      for (int64_t h = 0; h < group / HALF; h++, rows += R * Rows::words(HALF)) {
        UNROLLED for (int i = 0; i < BYTES / (4 * PANEL); i++) {
          UNROLLED for (int v = 0; v < V; v++) {
            const uint8_t* from = values[v] + h * BYTES + i * 4 * PANEL + 4 * columns[v].from;
            prefetch(from + AHEAD);  // streams end with their pages, every few microseconds
            const Words bytes = load_words(from);
            if constexpr (BITS == 8) {
              Rows::template add<BITS>(bytes, rows, i, matrix.zero, v, sums);
            } else {
              Words low = low_fours(bytes), high = high_fours(bytes);
              // Of each further bit 8 bytes for each of the two.
              const uint8_t* bits = values[v] + PANEL * (group / 2 + h * HALF / 8 + i);
              UNROLLED for (int bit = 4; bit < BITS; bit++, bits += plane) {
                low = with_bits(low, bits + columns[v].from / 2, 1 << bit);
                high = with_bits(high, bits + (PANEL + columns[v].from) / 2, 1 << bit);
              }
              Rows::template add<BITS>(low, rows, 2 * i, matrix.zero, v, sums);
              Rows::template add<BITS>(high, rows, 2 * i + 1, matrix.zero, v, sums);
            }
          }
        }
      }
      UNROLLED for (int v = 0; v < V; v++) {
        values[v] += size;
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
      rows += R * Rows::MORE;
    }
  }
  UNROLLED for (int v = 0; v < V; v++)
    UNROLLED for (int r = 0; r < R; r++) {
      const int64_t output = columns[v].panel * PANEL + columns[v].from;
      store(out + places[r] * matrix.panels * PANEL + output, totals[v][r]);
    }
}

// All rows, packed in tiles, with some panels. Two that are computed at a time lie apart in memory, as
// long streams.
template <class T, int BITS>
void dot_all(const Word* packed, const Matrix& matrix, const int64_t* places, int64_t rows,
             int64_t first, int64_t count, float* out) {
  constexpr int64_t MOST_ROWS = Packed<T>::MOST_ROWS;
  const int64_t tile = tile_of(rows, MOST_ROWS);
  const int64_t size = packed_size<T>(matrix);
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
  const int64_t size = packed_size<T>(matrix) * ENTRIES / matrix.inputs();
  for (int64_t r = 0; r < R; r++) {
    const T* row = arrays.rows + places[r] * arrays.I;
    for (int64_t i = 0; i < matrix.inputs(); i += ENTRIES) {
      float entries[ENTRIES];
      as_floats(row + i, 0, 1, std::min<int64_t>(arrays.I - i, ENTRIES), ENTRIES, entries);
      Packed<T>::take(entries, matrix.group, matrix.zero, R, to + i / ENTRIES * size * R + r);
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
  const int64_t I = matrix.inputs(), size = packed_size<T>(matrix);
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
  const bool worth_sharing = R * matrix.panels * PANEL * I > WORTH_SHARING;
  run_tasks(pool, pieces(matrix.panels, block), worth_sharing, std::move(work));
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
