// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on arrays of exact size with threads of its own, for the sanitizers. What it
// computes is held against nothing but itself: with one thread and with four, the same bits.

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cache_scores/native.cc"
#include "narrow_product/native.cc"
#include "product/native.cc"
#include "best_slots/native.cc"
#include "gate/native.cc"
#include "rms_norm/native.cc"
#include "rotary/native.cc"
#include "tree_attention/native.cc"

namespace {

struct Threads {  // as much of xla::ffi::ThreadPool as the kernels use
  int64_t count;
  std::vector<std::thread> begun;

  explicit Threads(int64_t count) : count(count) {}
  ~Threads() {
    for (auto& thread : begun) thread.join();
  }
  int64_t num_threads() const { return count; }
  template <class Task>
  void Schedule(Task task) {
    begun.emplace_back(std::move(task));
  }
};

std::mt19937 random_bits(0);

template <class T>
std::vector<T> normal(int64_t size) {
  std::normal_distribution<float> distribution;
  std::vector<T> numbers(size);
  for (auto& number : numbers) tsjax::from_float(distribution(random_bits), &number);
  return numbers;
}

int64_t up_to(int64_t most) { return static_cast<int64_t>(random_bits() % most); }

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Rows of a cache, wide or narrow, each array of its exact size.
template <class T>
struct Cache {
  std::vector<T> wide;
  std::vector<int8_t> numbers, exponents;

  Cache(int64_t rows, int64_t H, bool narrow) {
    if (!narrow) {
      wide = normal<T>(rows * H);
      return;
    }
    for (int64_t i = 0; i < rows * H; i++) numbers.push_back(static_cast<int8_t>(up_to(255) - 127));
    const int64_t few = up_to(2) ? 20 : 240;  // of these some come too early for products of numbers
    for (int64_t i = 0; i < rows; i++) exponents.push_back(static_cast<int8_t>(up_to(few) - few / 2));
  }
  tsjax::Stored<T> stored() const {
    if (exponents.empty()) return wide.data();
    return {numbers.data(), exponents.data()};
  }
};

template <class T>
bool attention(int64_t B, int64_t T_, int64_t K, int64_t G, int64_t S, int64_t H) {
  const bool narrow = up_to(2);
  const Cache<T> k(B * K * S, H, narrow), v(B * K * S, H, narrow);
  auto q = normal<T>(B * T_ * K * G * H);
  auto k_new = normal<T>(B * T_ * K * H), v_new = normal<T>(B * T_ * K * H);
  auto mean = normal<T>(B * K * G * H);
  auto log_total = normal<float>(B * K * G);
  std::vector<int32_t> length(B), slots(B * S), rows(B * T_, 5), live(B);
  for (auto& n : live) n = static_cast<int32_t>(up_to(T_ + 1));
  for (auto& n : length) n = static_cast<int32_t>(up_to(S + 1));
  for (auto& rank : slots) rank = static_cast<int32_t>(up_to(9));
  std::unique_ptr<bool[]> mask(new bool[B * T_ * T_]);
  for (int64_t i = 0; i < B * T_ * T_; i++) {
    mask[i] = i / T_ % T_ == i % T_ || (i % T_ < i / T_ % T_ && up_to(2));
  }
  bool with_rest = up_to(2), with_ranks = up_to(2), some_live = up_to(2);
  std::vector<T> outs[2];
  for (int i = 0; i < 2; i++) {
    outs[i].resize(q.size());
    std::vector<float> log_totals(B * T_ * K * G);
    tsjax::attention::Arrays<T> arrays{
        q.data(), k.stored(), v.stored(), k_new.data(), v_new.data(), length.data(), mask.get(),
        with_rest ? mean.data() : nullptr, log_total.data(), with_ranks ? slots.data() : nullptr,
        rows.data(), some_live ? live.data() : nullptr, outs[i].data(), log_totals.data(), B, T_, K * G, K, S, H};
    Threads pool(i ? 4 : 1);
    tsjax::attention::attend(pool, arrays);
  }
  return same(outs[0], outs[1]);
}

template <class T>
bool scores(int64_t B, int64_t K, int64_t G, int64_t S, int64_t H) {
  auto q = normal<T>(B * K * G * H);
  const Cache<T> k(B * K * S, H, up_to(2));
  auto totals = normal<float>(B * K * G);
  std::vector<int32_t> length(B);
  for (auto& n : length) n = static_cast<int32_t>(up_to(S + 1));
  bool softmax = up_to(2), given = up_to(2);
  std::vector<float> outs[2];
  for (int i = 0; i < 2; i++) {
    outs[i].resize(B * K * S);
    tsjax::scores::Arrays<T> arrays{q.data(), k.stored(), length.data(), B, K * G, K, S, H};
    Threads pool(i ? 4 : 1);
    tsjax::scores::score(pool, arrays, softmax, given ? totals.data() : nullptr, outs[i].data());
  }
  return same(outs[0], outs[1]);
}

bool best_slots(int64_t B, int64_t K, int64_t S) {
  auto scores = normal<float>(B * K * S);
  const tsjax::best::Wanted wanted{1 + up_to(S - 1), static_cast<int64_t>(up_to(20))};
  std::vector<int32_t> length(B);
  for (auto& one : length) one = up_to(S + 1);
  std::vector<int32_t> outs[2];
  for (int i = 0; i < 2; i++) {
    outs[i].resize(B * K * wanted.count);
    Threads pool(i ? 4 : 1);
    tsjax::best::choose_all(pool, scores.data(), length.data(), B, K, S, wanted,
                            outs[i].data());
  }
  return same(outs[0], outs[1]);
}

template <class T, class Weight>
bool products(int64_t R, int64_t O, int64_t I) {
  auto rows = normal<T>(R * I);
  auto scales = normal<float>(O);
  std::vector<Weight> weights(O * I);
  std::vector<int32_t> live{static_cast<int32_t>(up_to(R + 1))};
  const tsjax::Live some{up_to(2) ? live.data() : nullptr, R};
  for (auto& weight : weights) weight = Weight{static_cast<decltype(Weight{}.bits)>(up_to(100))};
  std::vector<float> outs[2];
  for (int i = 0; i < 2; i++) {
    outs[i].resize(R * O);
    tsjax::product::Arrays<T> arrays{rows.data(), outs[i].data(), R, O, I, some};
    Threads pool(i ? 4 : 1);
    tsjax::product::multiply(pool, arrays, weights.data(), scales.data());
  }
  return same(outs[0], outs[1]);
}

template <class T, int BITS>
bool narrow_products(int64_t R, int64_t P, int64_t wide, int64_t group) {
  const bool steps = up_to(2), with_least = up_to(2);
  const int64_t I = 256 * wide, G = I / group, S = steps ? wide : G;
  auto rows = normal<T>(R * I);
  std::vector<uint8_t> values(P * I * 2 * BITS);
  std::vector<tsjax::half> numbers(P * S * 16);
  std::vector<int8_t> of_groups(P * G * 16);
  for (auto& value : values) value = up_to(256);
  for (auto& number : numbers) number.bits = 0x3000 + up_to(1000);
  for (auto& step : of_groups) step = up_to(100);
  std::vector<int32_t> live{static_cast<int32_t>(up_to(R + 1))};
  const tsjax::narrow::Levels levels{numbers.data(), steps ? of_groups.data() : nullptr};
  const tsjax::narrow::Levels least = with_least ? levels : tsjax::narrow::Levels{};
  const tsjax::narrow::Matrix matrix{values.data(), levels, least, P, G, S, group, 8};
  std::vector<float> outs[2];
  for (int i = 0; i < 2; i++) {
    outs[i].resize(R * P * 16);
    tsjax::narrow::Arrays<T> arrays{rows.data(), outs[i].data(), R, I, {live.data(), R}};
    Threads pool(i ? 4 : 1);
    tsjax::narrow::multiply<T, BITS>(pool, arrays, matrix);
  }
  return same(outs[0], outs[1]);
}

}  // namespace

int main() {
  for (int turn = 0; turn < 40; turn++) {
    int64_t B = 1 + up_to(3), K = 1 + up_to(3), G = 1 + up_to(8), H = 8 * (1 + up_to(9));
    int64_t S = 1 + up_to(turn % 4 ? 300 : 2500), T = turn % 5 ? 1 + up_to(9) : 1 + up_to(120);
    bool well = attention<float>(B, T, K, G, S, H) && attention<tsjax::bfloat16>(B, T, K, G, S, H) &&
                scores<float>(B, K, G, S, H) && scores<tsjax::bfloat16>(B, K, G, S, H);
    int64_t O = 1 + up_to(400), I = 1 + up_to(500);
    auto floats = normal<float>(O * I), rows = normal<float>(T * I);
    std::vector<float> outs[2];
    for (int i = 0; i < 2; i++) {
      outs[i].resize(T * O);
      tsjax::product::Arrays<float> arrays{rows.data(), outs[i].data(), T, O, I, {nullptr, 1}};
      Threads pool(i ? 4 : 1);
      tsjax::product::multiply(pool, arrays, floats.data(), static_cast<float*>(nullptr));
    }
    well = well && same(outs[0], outs[1]);
    well = well && best_slots(B, K, 40 * S);
    well = well && products<tsjax::bfloat16, tsjax::bfloat16>(T, O, I);
    const int64_t panels = 1 + up_to(9), wide = 1 + up_to(3), group = 16 << up_to(2);
    well = well && narrow_products<tsjax::bfloat16, 4>(T, panels, wide, group) &&
           narrow_products<tsjax::bfloat16, 6>(T, panels, wide, group) &&
           narrow_products<tsjax::bfloat16, 8>(T, panels, wide, group) &&
           narrow_products<float, 4>(T, panels, wide, group);
    auto weight = normal<float>(I);
    std::vector<float> normed(T * I);
    for (int64_t r = 0; r < T; r++) {
      tsjax::norms::normalize(rows.data() + r * I, weight.data(), I, 1e-5f, normed.data() + r * I);
    }
    if (!well) {
      std::printf("not the same bits with one thread and with four, in turn %d\n", turn);
      return 1;
    }
  }
  std::printf("done\n");
}
