// SPDX-License-Identifier: Apache-2.0
// The slots with the highest scores on a CPU: a threshold that enough scores reach, and not many
// more, is found by counting, and only what reaches it is put in order.

#include <algorithm>
#include <bit>
#include <functional>

#include "../native/call.h"
#include "../native/tasks.h"

namespace tsjax::best {

constexpr int64_t WORTH_SHARING = 1 << 13;  // scores
constexpr int FIRST_BITS = 20;              // of a threshold: finer ones leave out hardly more

struct Wanted {
  int64_t count, first;
};

// A number that is larger for a higher score; 0 for none.
inline uint32_t rank(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score == 0.0f ? 0.0f : score);  // -0 is not below 0
  return bits == 0xff800000u ? 0 : bits >> 31 ? ~bits : bits | 1u << 31;
}

// How many reach the threshold. Counted in parts that fit the lanes of the ranks.
inline int64_t reach(const uint32_t* ranks, int64_t length, uint32_t threshold) {
  int64_t all = 0;
  for (int64_t i = 0; i < length; i += 1 << 16) {
    uint32_t some = 0;
    const int64_t end = std::min<int64_t>(length, i + (1 << 16));
    for (int64_t j = i; j < end; j++) some += ranks[j] >= threshold;
    all += some;
  }
  return all;
}

inline void choose(const float* scores, int64_t length, Wanted wanted, int32_t* slots) {
  auto* ranks = reinterpret_cast<uint32_t*>(scratch<0>(std::max<int64_t>(length, 1)));
  for (int64_t i = 0; i < length; i++) ranks[i] = rank(scores[i]);
  for (int64_t i = 0; i < std::min(length, wanted.first); i++) ranks[i] = ranks[i] ? ~0u : 0;

  uint32_t lowest = 1;  // which every score reaches
  int64_t found = reach(ranks, length, lowest);
  for (int bit = 31; bit >= 32 - FIRST_BITS && found > 2 * wanted.count; bit--) {
    const uint32_t higher = (lowest > 1 ? lowest : 0) | 1u << bit;
    const int64_t fewer = reach(ranks, length, higher);
    if (fewer >= wanted.count) lowest = higher, found = fewer;
  }

  // Rank and slot in one number, the earlier one of two equal ranks above the other.
  auto* best = reinterpret_cast<uint64_t*>(scratch<1>(2 * std::max<int64_t>(found, 1)));
  int64_t n = 0;
  for (int64_t i = 0; i < length; i++) {
    if (ranks[i] >= lowest) {
      best[n++] = static_cast<uint64_t>(ranks[i]) << 32 | static_cast<uint32_t>(~i);
    }
  }
  const int64_t most = std::min(n, wanted.count);
  std::nth_element(best, best + most, best + n, std::greater<>());
  std::sort(best, best + most, std::greater<>());
  for (int64_t i = 0; i < most; i++) slots[i] = ~static_cast<uint32_t>(best[i]);
  std::fill(slots + most, slots + wanted.count, 0);
}

template <class Pool>
void choose_all(Pool& pool, const float* scores, const int32_t* length, int64_t B, int64_t K,
                int64_t S, Wanted wanted, int32_t* slots) {
  run_tasks(pool, B * K, B * K * S > WORTH_SHARING, [=](int64_t head) {
    const int64_t known = std::clamp<int64_t>(length[head / K], 0, S);
    choose(scores + head * S, known, wanted, slots + head * wanted.count);
  });
}

}  // namespace tsjax::best

// scores, length; slots. Attribute: first.
extern "C" XLA_FFI_Error* tsjax_best_slots(XLA_FFI_CallFrame* frame) {
  using namespace tsjax;
  return answer(frame, {.arguments = 2, .results = 1, .attributes = 1}, [](const Call& call) {
    const Array scores = call.argument(0), slots = call.result(0);
    best::choose_all(call, scores.data<float>(), call.argument(1).data<int32_t>(), scores.dim(0),
                     scores.dim(1), scores.dim(2), {slots.dim(2), call.attribute<int32_t>(0)},
                     slots.data<int32_t>());
  });
}
