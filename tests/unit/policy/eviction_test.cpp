#include "policy/eviction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "unit/policy/policy_twins.h"

namespace sluice {
namespace {

std::string kind_name(const testing::TestParamInfo<PolicyKind>& info) {
  return policy_name(info.param);
}

TEST(PolicyNames, GoBothWays) {
  for (const PolicyKind kind : kPolicyKinds) {
    const auto parsed = parse_policy(policy_name(kind));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, kind);
  }
  const auto unknown = parse_policy("LRU");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, ErrorCode::kBadArgument);
  EXPECT_EQ(unknown.error().message(), "policy: wanted lru, lfu, lfru or s3fifo, given 'LRU'");
}

// What a pool may do to its policy, at random: slots that hit, are pinned without a request, evicted, refilled,
// dropped, and experts that are asked for while they are anywhere.
class RandomPool {
 public:
  RandomPool(uint64_t seed, const PolicyOptions& options)
      : random_(seed),
        options_(options),
        slots_(options.n_slot),
        policy_(make_policy(options)),
        twin_(make_twin(options)) {}

  void step() {
    const uint32_t choice = below(100);
    if (choice < 30) {
      if (const auto slot = pick(State::kEvictable)) {
        on_access(slots_[*slot].id);
        acquire(*slot);
      }
    } else if (choice < 33) {
      if (const auto slot = pick(State::kEvictable)) acquire(*slot);
    } else if (choice < 55) {
      load();
    } else if (choice < 85) {
      if (const auto slot = pick(State::kHeld)) release(*slot);
    } else if (choice < 87) {
      if (const auto slot = pick(State::kHeld)) {
        slots_[*slot].id = new_expert();
        release(*slot);
      }
    } else if (choice < 92) {
      on_access(any_expert());
    } else if (choice < 94) {
      if (const auto slot = policy_->victim()) {
        acquire(*slot);
        release(*slot);
      }
    } else {
      policy_->advance();
      twin_->advance();
    }
  }

  std::optional<uint32_t> victim() const { return policy_->victim(); }
  std::optional<uint32_t> twin_victim() const { return twin_->victim(); }
  uint64_t n_eviction() const { return n_eviction_; }

 private:
  enum class State { kEmpty, kEvictable, kHeld };
  struct Slot {
    State state = State::kEmpty;
    ExpertId id;
  };

  uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  std::optional<uint32_t> pick(State state) {
    const uint32_t start = below(options_.n_slot);
    for (uint32_t i = 0; i < options_.n_slot; i++) {
      const uint32_t slot = (start + i) % options_.n_slot;
      if (slots_[slot].state == state) return slot;
    }
    return std::nullopt;
  }
  // Low numbers are more likely, as in real routing.
  ExpertId any_expert() {
    return {below(options_.n_layer), std::min(below(options_.n_expert), below(options_.n_expert))};
  }
  ExpertId new_expert() {
    while (true) {
      const ExpertId id = any_expert();
      const bool here = std::any_of(slots_.begin(), slots_.end(),
                                    [&](const Slot& slot) { return slot.state != State::kEmpty && slot.id == id; });
      if (!here) return id;
    }
  }
  void load() {
    auto slot = pick(State::kEmpty);
    if (!slot) {
      slot = policy_->victim();
      if (!slot) return;
      n_eviction_++;
    }
    const ExpertId id = new_expert();
    on_access(id);
    if (slots_[*slot].state == State::kEvictable) acquire(*slot);
    slots_[*slot] = {State::kHeld, id};
  }
  void on_access(ExpertId id) {
    policy_->on_access(id);
    twin_->on_access(id);
  }
  void acquire(uint32_t slot) {
    policy_->acquire(slot);
    twin_->acquire(slot);
    slots_[slot].state = State::kHeld;
  }
  void release(uint32_t slot) {
    policy_->release(slot, slots_[slot].id);
    twin_->release(slot, slots_[slot].id);
    slots_[slot].state = State::kEvictable;
  }

  std::mt19937_64 random_;
  PolicyOptions options_;
  std::vector<Slot> slots_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<EvictionPolicy> twin_;
  uint64_t n_eviction_ = 0;
};

class EveryPolicy : public testing::TestWithParam<PolicyKind> {};

INSTANTIATE_TEST_SUITE_P(Policies, EveryPolicy, testing::ValuesIn(kPolicyKinds), kind_name);

TEST_P(EveryPolicy, ChoosesAsItsTwin) {
  for (const uint32_t n_slot : {1U, 3U, 10U, 24U, 40U}) {
    RandomPool pool(n_slot, {GetParam(), n_slot, 3, 20, 7, 5});
    for (int step = 0; step < 40000; step++) {
      pool.step();
      ASSERT_EQ(pool.victim(), pool.twin_victim()) << n_slot << " slots, step " << step;
    }
    EXPECT_GT(pool.n_eviction(), 1000U);
  }
}

TEST_P(EveryPolicy, HasNoVictimWhereNothingIsEvictable) {
  const auto policy = make_policy({GetParam(), 2, 1, 8});
  EXPECT_EQ(policy->victim(), std::nullopt);
  policy->release(1, {0, 5});
  EXPECT_EQ(policy->victim(), 1U);
  EXPECT_EQ(policy->victim(), 1U);
  policy->on_access({0, 5});
  policy->acquire(1);
  EXPECT_EQ(policy->victim(), std::nullopt);
}

TEST_P(EveryPolicy, StopsAtMisuse) {
  const auto policy = make_policy({GetParam(), 2, 1, 8});
  policy->release(1, {0, 5});
  EXPECT_DEATH(policy->release(1, {0, 5}), "slot 1");
  EXPECT_DEATH(policy->acquire(0), "slot 0");
  EXPECT_DEATH(policy->release(2, {0, 6}), "slot 2");
}

TEST(Lru, ForgetsNothingOfTheOrder) {
  const auto policy = make_policy({PolicyKind::kLru, 3, 1, 8});
  for (const uint32_t slot : {2U, 0U, 1U}) policy->release(slot, {0, slot});
  EXPECT_EQ(policy->victim(), 2U);
  policy->acquire(2);
  policy->release(2, {0, 2});
  EXPECT_EQ(policy->victim(), 0U);
  policy->acquire(1);  // from the middle
  policy->acquire(0);
  EXPECT_EQ(policy->victim(), 2U);
}

TEST(Lfu, RemembersExpertsThatAreNotResident) {
  const auto policy = make_policy({PolicyKind::kLfu, 2, 1, 8});
  for (int i = 0; i < 3; i++) policy->on_access({0, 7});  // never resident so far
  policy->on_access({0, 1});
  policy->on_access({0, 1});
  policy->release(0, {0, 7});
  policy->release(1, {0, 1});
  EXPECT_EQ(policy->victim(), 1U);
  policy->on_access({0, 1});  // now equal: 7 was released first
  EXPECT_EQ(policy->victim(), 0U);
}

TEST(Lfu, HalvesAllCountsEveryInterval) {
  const auto policy =
      make_policy({.kind = PolicyKind::kLfu, .n_slot = 2, .n_layer = 1, .n_expert = 8, .decay_interval = 3});
  for (int i = 0; i < 5; i++) policy->on_access({0, 0});
  policy->release(0, {0, 0});
  policy->on_access({0, 1});
  policy->release(1, {0, 1});
  policy->advance();
  policy->advance();
  for (int i = 0; i < 3; i++) policy->on_access({0, 1});
  EXPECT_EQ(policy->victim(), 1U);  // 5 against 4
  policy->advance();                // 2 against 2, and 0 was released first
  EXPECT_EQ(policy->victim(), 0U);
}

// The victim's exact score, the sum of 2^(-age / half_life), is the smallest one, up to what the straight line between
// powers of two is off: at most max over x in [0, 1] of (1 + x) / 2^x = 1.0615, and fixed-point dust.
TEST(Lfru, FollowsItsFormula) {
  constexpr uint32_t kExperts = 12;
  constexpr double kHalfLife = 6;
  std::mt19937 random(4);
  const auto policy = make_policy({.kind = PolicyKind::kLfru,
                                   .n_slot = kExperts,
                                   .n_layer = 1,
                                   .n_expert = kExperts,
                                   .half_life = static_cast<uint64_t>(kHalfLife)});
  for (uint32_t slot = 0; slot < kExperts; slot++) policy->release(slot, {0, slot});
  std::vector<double> exact(kExperts, 0);
  int n_better_than_lfu = 0;
  std::vector<int> counts(kExperts, 0);
  for (int forward = 0; forward < 3000; forward++) {
    for (int i = 0; i < 3; i++) {
      const auto shift = static_cast<uint32_t>(forward) / 100;
      const auto expert = static_cast<uint32_t>((random() + shift) % kExperts / (random() % 3 + 1));
      policy->on_access({0, expert});
      exact[expert] += 1;
      counts[expert]++;
    }
    const double best = *std::min_element(exact.begin(), exact.end());
    const uint32_t victim = policy->victim().value();
    ASSERT_LE(exact[victim], best * 1.0616 + 1e-5) << "forward " << forward;
    if (counts[victim] != *std::min_element(counts.begin(), counts.end())) n_better_than_lfu++;
    policy->advance();
    for (double& score : exact) score *= std::exp2(-1 / kHalfLife);
  }
  EXPECT_GT(n_better_than_lfu, 100);  // otherwise the formula was never put to the test
}

class S3Fifo : public testing::Test {
 protected:
  void load(uint32_t slot, uint32_t expert) {
    policy->on_access({0, expert});
    policy->release(slot, {0, expert});
  }
  void hit(uint32_t slot, uint32_t expert) {
    policy->on_access({0, expert});
    policy->acquire(slot);
    policy->release(slot, {0, expert});
  }
  uint32_t evict() {
    const uint32_t slot = policy->victim().value();
    policy->acquire(slot);
    return slot;
  }
  // 20 slots: the small queue's share is 2.
  std::unique_ptr<EvictionPolicy> policy = make_policy({PolicyKind::kS3Fifo, 20, 1, 64});
};

TEST_F(S3Fifo, PromotesWhatWasUsedTwiceAndEvictsTheRest) {
  for (uint32_t slot = 0; slot < 4; slot++) load(slot, slot);
  hit(0, 0);
  hit(1, 1);
  hit(1, 1);
  EXPECT_EQ(evict(), 0U);  // once is not enough
  EXPECT_EQ(evict(), 2U);  // 1 went to the main queue
  load(2, 20);
  EXPECT_EQ(evict(), 3U);
  EXPECT_EQ(evict(), 1U);  // the small queue is below its share: main's turn
}

TEST_F(S3Fifo, KeepsThePlaceOfPinnedSlots) {
  for (uint32_t slot = 0; slot < 4; slot++) load(slot, slot);
  policy->on_access({0, 0});
  policy->acquire(0);
  EXPECT_EQ(policy->victim(), 1U);
  policy->release(0, {0, 0});
  EXPECT_EQ(policy->victim(), 0U);
}

TEST_F(S3Fifo, LetsGhostsIntoTheMainQueue) {
  for (uint32_t slot = 0; slot < 4; slot++) load(slot, slot);
  EXPECT_EQ(evict(), 0U);
  load(0, 20);
  EXPECT_EQ(evict(), 1U);
  load(1, 0);              // comes back, and enters the main queue
  EXPECT_EQ(evict(), 2U);  // small: slots 3 and 0
  EXPECT_EQ(evict(), 3U);
  EXPECT_EQ(evict(), 1U);  // the small queue is below its share
}

TEST_F(S3Fifo, TakesAnEvictionBack) {
  for (uint32_t slot = 0; slot < 4; slot++) load(slot, slot);
  EXPECT_EQ(evict(), 0U);
  policy->release(0, {0, 0});
  EXPECT_EQ(policy->victim(), 0U);
}

}  // namespace
}  // namespace sluice
