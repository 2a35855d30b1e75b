// The simulator on routing that was measured: ids of a really trained model over held-out text (models/README.md tells
// how they were made), one token a forward. The figures are those that docs/hit-rates.md states.
#include <gtest/gtest.h>

#include "policy/replay.h"

namespace sluice {
namespace {

constexpr uint32_t kLayers = 8, kExperts = 128, kTopK = 8;

const RoutingTrace& measured() {
  static const RoutingTrace trace = [] {
    RoutingHeader shape{.n_layer = kLayers, .n_expert = kExperts, .top_k = kTopK, .model = "", .record_bytes = {}};
    return std::move(read_raw_routing(SLUICE_SOURCE_DIR "/models/reference/routing_trace.u8", shape)).value();
  }();
  return trace;
}

// Every routed expert as a call of its own: what a plain cache sees, without pins.
RoutingTrace one_by_one(const RoutingTrace& trace) {
  RoutingTrace single = trace;
  single.header.top_k = 1;
  single.records.clear();
  for (const RoutingRecord& record : trace.records) {
    for (uint64_t i = 0; i < uint64_t{record.n_token} * trace.header.top_k; ++i) {
      single.records.push_back({record.layer, 1, record.first + i});
    }
  }
  return single;
}

double hit_rate(const RoutingTrace& trace, const ReplayPools& pools, PolicyKind policy) {
  return std::move(replay(trace, {.pools = pools, .policy = {.kind = policy}})).value().total.hit_rate();
}

TEST(MeasuredRouting, APlainCachePerLayerHasTheHitRateThatWasCountedElsewhere) {
  ASSERT_EQ(measured().records.size(), 8192u * kLayers);
  // Counted independently over 12,000 tokens: 0.422 and 0.726. These are the first 8,192 of them.
  const RoutingTrace single = one_by_one(measured());
  EXPECT_NEAR(hit_rate(single, pool_per_layer(single, 32 * kLayers), PolicyKind::kLru), 0.42, 0.01);
  EXPECT_NEAR(hit_rate(single, pool_per_layer(single, 64 * kLayers), PolicyKind::kLru), 0.73, 0.01);
  // The engine pins a call's hits before its misses take slots: a little more is hit.
  EXPECT_NEAR(hit_rate(measured(), pool_per_layer(measured(), 32 * kLayers), PolicyKind::kLru), 0.446, 0.0005);
  EXPECT_NEAR(hit_rate(measured(), pool_per_layer(measured(), 64 * kLayers), PolicyKind::kLru), 0.739, 0.0005);
}

TEST(MeasuredRouting, TheDefaultPolicyIsTheBestAtEverySizeOfASharedPool) {
  for (const uint32_t percent : {5u, 10u, 25u, 50u, 75u}) {
    const ReplayPools pools = one_pool(measured(), kLayers * kExperts * percent / 100);
    const double lfru = hit_rate(measured(), pools, PolicyKind::kLfru);
    for (const PolicyKind other : kPolicyKinds) EXPECT_GE(lfru, hit_rate(measured(), pools, other)) << percent;
    const auto bound = replay_bound(measured(), {.pools = pools, .policy = {}});
    EXPECT_LT(lfru, bound->total.hit_rate()) << percent;
  }
}

TEST(MeasuredRouting, BelowOneTokensWorkingSetThePolicyThatStillHitsIsTaken) {
  for (const uint32_t n_slot : {16u, 32u, 51u, 63u}) {
    const ReplayPools pools = one_pool(measured(), n_slot);
    for (const PolicyKind wanted : kPolicyKinds) {
      const PolicyKind taken = policy_for_pool(wanted, n_slot, kLayers, kTopK);
      EXPECT_GT(hit_rate(measured(), pools, taken), 0.03) << n_slot;
      EXPECT_GE(hit_rate(measured(), pools, taken), hit_rate(measured(), pools, wanted)) << n_slot;
    }
    if (n_slot <= 51) {
      EXPECT_LT(hit_rate(measured(), pools, PolicyKind::kLru), 0.001) << "the cliff";
    }
  }
  for (const PolicyKind wanted : kPolicyKinds) EXPECT_EQ(policy_for_pool(wanted, 64, kLayers, kTopK), wanted);
}

}  // namespace
}  // namespace sluice
