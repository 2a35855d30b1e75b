#include "predict/prefetch_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace sluice {
namespace {

using Row = std::vector<ExpertScore>;

TEST(PrefetchPlan, ReadsEveryWord) {
  const auto plan =
      parse_prefetch_plan("ahead=1/2@24,mult=1.5,min_score=0.02,layer_max=8,forward_max=64,layers=4-40:47");
  ASSERT_TRUE(plan.ok()) << plan.error().message();
  EXPECT_EQ(plan->ahead.ahead_lo, 1u);
  EXPECT_EQ(plan->ahead.ahead_hi, 2u);
  EXPECT_EQ(plan->ahead.cutoff, 24u);
  EXPECT_EQ(plan->mult, 1.5);
  EXPECT_FLOAT_EQ(plan->min_score, 0.02f);
  EXPECT_EQ(plan->layer_max, 8u);
  EXPECT_EQ(plan->forward_max, 64u);
  EXPECT_FALSE(plan->allows(3));
  EXPECT_TRUE(plan->allows(40));
  EXPECT_FALSE(plan->allows(46));
  EXPECT_TRUE(plan->allows(47));
  EXPECT_TRUE(parse_prefetch_plan("").ok());
  EXPECT_EQ(parse_prefetch_plan("ahead=3")->ahead.ahead_hi, 3u);
}

TEST(PrefetchPlan, NamesTheWordThatCannotBeUsed) {
  for (const char* text : {"ahead=0", "ahead=1/2", "mult=0", "mult=x", "layers=", "layers=5-2", "deeper=1", "mult",
                           "mult=1,mult=2", "layer_max=-1"}) {
    const auto plan = parse_prefetch_plan(text);
    ASSERT_FALSE(plan.ok()) << text;
    EXPECT_EQ(plan.error().code, ErrorCode::kBadArgument);
  }
  EXPECT_NE(parse_prefetch_plan("mult=1,deeper=1").error().message().find("'deeper=1'"), std::string::npos);
}

TEST(PrefetchBudget, MergesRowsByPlaceAndCutsByScore) {
  PrefetchBudget budget({.min_score = 0.2f});
  const std::vector<Row> rows = {{{1, 0.9f}, {2, 0.3f}, {3, 0.1f}}, {{4, 0.8f}, {1, 0.7f}, {5, 0.6f}}};
  std::vector<uint32_t> experts;
  budget.take(0, 1, rows, experts);
  EXPECT_EQ(experts, (std::vector<uint32_t>{1, 4, 2, 5}));
  EXPECT_EQ(PrefetchBudget({.mult = 1.5}).wanted(8), 12u);
  EXPECT_EQ(PrefetchBudget({.mult = 1.3}).wanted(2), 3u);
}

TEST(PrefetchBudget, LimitsOfLayerAndForwardBeginAnewWhenLayersWrap) {
  PrefetchBudget budget({.layer_max = 2, .forward_max = 3, .layers = {{1, 3}}});
  const std::vector<Row> rows = {{{1, 0.9f}, {2, 0.3f}, {3, 0.1f}}};
  const auto taken = [&](uint32_t source, uint32_t target) {
    std::vector<uint32_t> experts;
    budget.take(source, target, rows, experts);
    return experts.size();
  };
  EXPECT_EQ(taken(0, 1), 2u);
  EXPECT_EQ(taken(1, 2), 1u);  // the forward's third
  EXPECT_EQ(taken(2, 3), 0u);
  EXPECT_EQ(taken(0, 1), 2u);  // a new forward
  EXPECT_EQ(taken(3, 4), 0u);  // not an allowed layer
}

}  // namespace
}  // namespace sluice
