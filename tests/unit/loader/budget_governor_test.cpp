#include "loader/budget_governor.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace sluice {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kLookNs = GovernorOptions::kLookIntervalNs;
constexpr uint64_t kReserve = 64 * kMiB;
constexpr GovernorOptions kOptions{.pool_bytes_max = kGiB, .pool_bytes_min = 100 * kMiB, .reserve_bytes = kReserve};

TEST(BudgetGovernor, LeavesThePoolAloneWhileThereIsEnough) {
  BudgetGovernor governor(kOptions);
  for (int64_t look = 0; look < 100; ++look) {
    EXPECT_TRUE(governor.is_due(look * kLookNs));
    EXPECT_EQ(governor.update({.now_ns = look * kLookNs, .available_bytes = kReserve}), kGiB);
    EXPECT_FALSE(governor.is_due(look * kLookNs + kLookNs - 1));
  }
  EXPECT_EQ(governor.shrinks() + governor.grows(), 0u);
}

TEST(BudgetGovernor, ShrinksAtOnceByWhatIsMissing) {
  BudgetGovernor governor(kOptions);
  EXPECT_EQ(governor.update({.now_ns = 0, .available_bytes = 10 * kMiB}), kGiB - (96 - 10) * kMiB);
  EXPECT_EQ(governor.update({.now_ns = kLookNs, .available_bytes = 0}), kGiB - (86 + 96) * kMiB);
  EXPECT_EQ(governor.shrinks(), 2u);
}

TEST(BudgetGovernor, NeverShrinksBelowTheFloor) {
  BudgetGovernor governor(kOptions);
  for (int64_t look = 0; look < 100; ++look) governor.update({.now_ns = look * kLookNs, .available_bytes = 0});
  EXPECT_EQ(governor.pool_bytes(), kOptions.pool_bytes_min);
}

TEST(BudgetGovernor, GrowsBackSlowlyAndNotBeforeItHasBeenQuiet) {
  BudgetGovernor governor(kOptions);
  governor.update({.now_ns = 0, .available_bytes = 0});
  const uint64_t small = governor.pool_bytes();
  int64_t now = kLookNs;
  for (; now < 5 * kSecondNs; now += kLookNs) {
    EXPECT_EQ(governor.update({.now_ns = now, .available_bytes = kGiB}), small);
  }
  uint64_t last = small;
  int64_t grown_at = 0;
  for (; governor.pool_bytes() < kGiB; now += kLookNs) {
    ASSERT_LT(now, 60 * kSecondNs);
    const uint64_t bytes = governor.update({.now_ns = now, .available_bytes = kGiB});
    if (bytes == last) continue;
    EXPECT_GE(now - grown_at, kSecondNs);
    EXPECT_LE(bytes - last, kGiB / 32);
    grown_at = now;
    last = bytes;
  }
  EXPECT_EQ(governor.update({.now_ns = now + kSecondNs, .available_bytes = kGiB}), kGiB) << "and no further";
}

// A machine that has exactly so much for pool and rest: whatever the pool takes is missing from what is available.
TEST(BudgetGovernor, SettlesOnAFixedAmountOfMemoryAndDoesNotSwing) {
  for (const uint64_t total : {700 * kMiB, 900 * kMiB, 1100 * kMiB, 1200 * kMiB, 2000 * kMiB}) {
    BudgetGovernor governor(kOptions);
    uint64_t changes_late = 0;
    for (int64_t look = 0; look < 1000; ++look) {
      const uint64_t before = governor.pool_bytes();
      governor.update({.now_ns = look * kLookNs, .available_bytes = total - std::min(total, before)});
      if (look > 500) changes_late += governor.pool_bytes() != before;
    }
    EXPECT_EQ(changes_late, 0u) << total;
    EXPECT_LE(governor.pool_bytes() + kReserve, total) << "the reserve stays free";
    EXPECT_GE(governor.pool_bytes() + 2 * kReserve + 8 * kMiB, std::min(total, kGiB)) << "and the rest is used";
  }
}

TEST(BudgetGovernor, WaitingTasksShrinkItToHalfAtMost) {
  BudgetGovernor governor(kOptions);
  uint64_t stalled_us = 5'000'000;
  const auto look = [&](int64_t n) {
    stalled_us += 30'000;  // 15 % of the interval
    return governor.update(
        {.now_ns = n * kLookNs, .available_bytes = kGiB, .stalled_us = stalled_us, .stalls_are_own = true});
  };
  EXPECT_EQ(look(0), kGiB) << "what was before the first look does not count";
  EXPECT_EQ(look(1), kGiB) << "once is no warning";
  EXPECT_EQ(look(2), kGiB - kGiB / 16);
  for (int64_t n = 3; n < 40; ++n) look(n);
  EXPECT_EQ(governor.pool_bytes(), kGiB / 2);
}

TEST(BudgetGovernor, OthersWaitingCountsOnlyWhileLittleIsLeft) {
  for (const bool little : {false, true}) {
    BudgetGovernor governor(kOptions);
    for (int64_t n = 0; n < 10; ++n) {
      governor.update({.now_ns = n * kLookNs,
                       .available_bytes = little ? 2 * kReserve : kGiB,
                       .stalled_us = static_cast<uint64_t>(n) * 100'000});
    }
    EXPECT_EQ(governor.pool_bytes() < kGiB, little);
  }
}

TEST(BudgetGovernor, TheReserveFollowsTheMachine) {
  EXPECT_EQ(governor_reserve_bytes(100 * kMiB), 8 * kMiB);
  EXPECT_EQ(governor_reserve_bytes(3200 * kMiB), 100 * kMiB);
  EXPECT_EQ(governor_reserve_bytes(500 * kGiB), 256 * kMiB);
}

}  // namespace
}  // namespace sluice
