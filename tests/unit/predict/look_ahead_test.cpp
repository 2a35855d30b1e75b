#include "predict/look_ahead.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

namespace sluice {
namespace {

std::vector<uint32_t> first_layers(uint32_t n) {
  std::vector<uint32_t> layers(n);
  std::iota(layers.begin(), layers.end(), 0U);
  return layers;
}

TEST(LookAhead, LooksAShortWayBelowTheCutOffAndAFarWayFromItOn) {
  const LookAhead schedule(first_layers(12), {.ahead_lo = 1, .ahead_hi = 3, .cutoff = 4});
  const std::map<uint32_t, uint32_t> expected = {{0, 1}, {1, 2}, {2, 3},  {3, 4}, {4, 7},
                                                 {5, 8}, {6, 9}, {7, 10}, {8, 11}};
  for (uint32_t layer = 0; layer < 20; ++layer) {
    const auto it = expected.find(layer);
    EXPECT_EQ(schedule.target_for(layer), it == expected.end() ? std::nullopt : std::optional(it->second)) << layer;
  }
}

TEST(LookAhead, DenseLayersAreNeitherSourcesNorTargetsAndDoNotCount) {
  const std::vector<uint32_t> layers = {3, 5, 7, 8};
  const LookAhead schedule(layers, {.ahead_lo = 2, .ahead_hi = 1, .cutoff = 4});
  EXPECT_EQ(schedule.target_for(3), 7u);
  EXPECT_EQ(schedule.target_for(4), std::nullopt);
  EXPECT_EQ(schedule.target_for(5), std::nullopt) << "layer 3 has asked for layer 7 already";
  EXPECT_EQ(schedule.target_for(7), 8u);
  EXPECT_EQ(schedule.target_for(8), std::nullopt);
}

TEST(LookAhead, WithoutLayersThereIsNoTarget) {
  EXPECT_EQ(LookAhead({}, {}).target_for(0), std::nullopt);
}

// Every number of layers, every cut-off, all distances that differ in kind.
TEST(LookAhead, EachLayerIsATargetAtMostOnceAndNoneLiesBeyondTheLast) {
  for (uint32_t n_layer = 1; n_layer <= 128; ++n_layer) {
    const std::vector<uint32_t> layers = first_layers(n_layer);
    std::set<uint32_t> distances = {0, 1, 2, 3, 4, 7, n_layer - 1, n_layer, n_layer + 1, UINT32_MAX};
    for (const uint32_t lo : distances) {
      for (const uint32_t hi : distances) {
        for (uint32_t cutoff = 0; cutoff <= n_layer + 1; ++cutoff) {
          const LookAhead schedule(layers, {.ahead_lo = lo, .ahead_hi = hi, .cutoff = cutoff});
          std::vector<bool> taken(n_layer, false);
          for (uint32_t layer = 0; layer < n_layer; ++layer) {
            const uint64_t wanted = uint64_t{layer} + std::max(layer < cutoff ? lo : hi, 1U);
            const auto target = schedule.target_for(layer);
            if (wanted >= n_layer || taken[wanted]) {
              ASSERT_FALSE(target) << n_layer << ' ' << lo << ' ' << hi << ' ' << cutoff << ' ' << layer;
            } else {
              ASSERT_TRUE(target && *target == wanted)
                  << n_layer << ' ' << lo << ' ' << hi << ' ' << cutoff << ' ' << layer;
              taken[wanted] = true;
            }
          }
          ASSERT_FALSE(schedule.target_for(n_layer - 1)) << "the last layer has nothing to look ahead to";
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice
