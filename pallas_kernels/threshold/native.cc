// SPDX-License-Identifier: Apache-2.0
// The largest threshold below which the masses of a row add up to at most so much, on a CPU: the
// masses are summed by the first digit of their keys, then those that share it by the next one.

#include <algorithm>

#include "../native/call.h"
#include "../native/tasks.h"

namespace tsjax::threshold {

constexpr int64_t WORTH_SHARING = 1 << 14;  // keys
constexpr int BITS = 11, DIGITS = 1 << BITS;
constexpr int AT_ONCE = 4;  // sums side by side: neighbours often have one digit

// masses == nullptr: 1 each.
inline uint32_t find(const uint32_t* keys, const uint32_t* masses, int64_t V, uint32_t most) {
  uint32_t sums[AT_ONCE][DIGITS];
  uint32_t known = 0, below = 0;  // the first bits of the threshold, and what lies below them
  for (int left = 32; left > 0;) {
    const int bits = std::min(BITS, left), shift = left - bits;
    const uint32_t mask = (1u << bits) - 1;
    for (auto& some : sums) std::fill_n(some, mask + 1, 0u);
    auto add = [&](int64_t i, int which) {
      if (left < 32 && keys[i] >> left != known) return;
      sums[which][keys[i] >> shift & mask] += masses ? masses[i] : 1;
    };
    int64_t i = 0;
    for (; i + AT_ONCE <= V; i += AT_ONCE)
      UNROLLED for (int which = 0; which < AT_ONCE; which++) add(i + which, which);
    for (; i < V; i++) add(i, 0);
    uint32_t digit = 0;
    for (; digit < mask; digit++) {
      uint32_t next = below;
      for (auto& some : sums) next += some[digit];
      if (next > most) break;
      below = next;
    }
    known = left < 32 ? known << bits | digit : digit;
    left = shift;
  }
  return known;
}

template <class Pool>
void find_all(Pool& pool, const uint32_t* keys, const uint32_t* masses, const uint32_t* most,
              int64_t rows, int64_t V, uint32_t* found) {
  run_tasks(pool, rows, rows * V > WORTH_SHARING, [=](int64_t row) {
    found[row] = find(keys + row * V, masses ? masses + row * V : nullptr, V, most[row]);
  });
}

}  // namespace tsjax::threshold

// Keys, masses or nothing, most; the thresholds.
extern "C" XLA_FFI_Error* tsjax_threshold(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 3, .results = 1}, [](const Call& call) {
    const Array keys = call.argument(0), most = call.argument(2);
    threshold::find_all(call, keys.data<uint32_t>(), call.argument(1).data<uint32_t>(),
                        most.data<uint32_t>(), most.size(), keys.last(),
                        call.result(0).data<uint32_t>());
  });
}
