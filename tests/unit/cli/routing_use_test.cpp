#include "cli/routing_use.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace sluice {
namespace {

std::vector<uint64_t> drawn(size_t n_expert, size_t choices, double skew, uint32_t seed) {
  std::vector<double> weights;
  for (size_t i = 0; i < n_expert; ++i) weights.push_back(std::exp(-skew * static_cast<double>(i)));
  std::discrete_distribution<size_t> expert(weights.begin(), weights.end());
  std::mt19937 random(seed);
  std::vector<uint64_t> counts(n_expert);
  for (size_t i = 0; i < choices; ++i) ++counts[expert(random)];
  return counts;
}

TEST(RoutingUse, EvenUseIsUniform) {
  const RoutingUse use = measure_routing_use({std::vector<uint64_t>(64, 100)});
  EXPECT_EQ(use.verdict, RoutingVerdict::kUniform);
  EXPECT_EQ(use.choices, 6400u);
  EXPECT_NEAR(use.hottest_quarter, 0.25, 1e-12);
  EXPECT_NEAR(use.entropy, 1.0, 1e-12);
}

TEST(RoutingUse, ChanceAloneIsUniformAtEveryLength) {
  for (const size_t choices : {512u, 1000u, 4000u, 100000u}) {
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      const RoutingUse use = measure_routing_use({drawn(128, choices, 0, seed), drawn(128, choices, 0, seed + 100)});
      EXPECT_EQ(use.verdict, RoutingVerdict::kUniform) << choices << " choices, seed " << seed;
      EXPECT_NEAR(use.hottest_quarter, use.hottest_quarter_even, 0.04) << choices << " choices, seed " << seed;
    }
  }
}

TEST(RoutingUse, ATrainedModelsUseIsUneven) {
  // exp(-i / 64) over 128 experts gives the hottest quarter 46 %, about what the bundled model has.
  const RoutingUse use = measure_routing_use({drawn(128, 2048, 1.0 / 64, 1)});
  EXPECT_EQ(use.verdict, RoutingVerdict::kUneven);
  EXPECT_GT(use.hottest_quarter, 0.42);
  EXPECT_LT(use.entropy, 0.98);
}

TEST(RoutingUse, FewChoicesSayNothing) {
  EXPECT_EQ(measure_routing_use({}).verdict, RoutingVerdict::kTooFewChoices);
  EXPECT_EQ(measure_routing_use({{}, std::vector<uint64_t>(64, 0)}).verdict, RoutingVerdict::kTooFewChoices);
  EXPECT_EQ(measure_routing_use({std::vector<uint64_t>(64, 3)}).verdict, RoutingVerdict::kTooFewChoices);
}

TEST(RoutingUse, LayersWithoutChoicesDoNotCount) {
  const RoutingUse use = measure_routing_use({{}, std::vector<uint64_t>(8, 50), {}});
  EXPECT_EQ(use.verdict, RoutingVerdict::kUniform);
  EXPECT_NEAR(use.hottest_quarter, 0.25, 1e-12);
}

}  // namespace
}  // namespace sluice
