#include "loader/prefetcher.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "loader_fixture.h"

namespace sluice {
namespace {

constexpr uint32_t kExperts = 32;
constexpr uint32_t kTopK = 2;

// Routers that read the experts' scores straight from the row.
std::shared_ptr<const LensSet> identity_lenses(const TestModel& model) {
  std::vector<RouterLens> lenses;
  for (const LayerSource& source : model.sources) {
    RouterWeights weights{
        .layer = source.layer, .n_embd = kExperts, .n_expert = kExperts, .top_k = kTopK, .epsilon = 1e-6f};
    weights.matrix.assign(size_t{kExperts} * kExperts, 0);
    for (uint32_t i = 0; i < kExperts; ++i) weights.matrix[size_t{i} * kExperts + i] = 1;
    weights.norm_weight.assign(kExperts, 2);
    lenses.emplace_back(weights);
  }
  return std::make_shared<const LensSet>(std::move(lenses));
}

std::vector<float> row_for(uint32_t best, uint32_t second) {
  std::vector<float> row(kExperts, 0);
  row[best] = 2;
  row[second] = 1;
  return row;
}

class PrefetcherTest : public testing::Test {
 protected:
  PrefetcherTest() : model_(make_test_model({48, 48, 48}, kExperts, DirectMode::kOff)) {
    const SlotPlan layout = plan_layout(model_->sources, kTopK);
    auto loader = Loader::create(model_->sources, std::move(open_device({})).value(),
                                 {.budget_bytes = layout.bytes_all / 2, .top_k = kTopK, .prefetch = true});
    EXPECT_TRUE(loader.ok()) << loader.error().message();
    loader_ = std::move(loader).value();
  }
  uint32_t layer(size_t source) const { return model_->sources[source].layer; }
  void demand(Prefetcher& prefetcher, size_t source, const std::vector<uint32_t>& experts, size_t n_row = 1) {
    ASSERT_TRUE(loader_->start(layer(source), experts).ok());
    prefetcher.see_demand(layer(source), n_row, experts.size());
    while (true) {
      const auto ready = loader_->next();
      ASSERT_TRUE(ready.ok());
      if (ready->empty()) break;
    }
    loader_->end();
  }
  PrefetchCounters counters() const {
    EngineStats stats;
    loader_->add_stats(stats);
    return stats.prefetch;
  }

  std::unique_ptr<TestModel> model_;
  std::unique_ptr<Loader> loader_;
};

TEST_F(PrefetcherTest, ReadsWhatTheLensSees) {
  Prefetcher prefetcher(*loader_, identity_lenses(*model_), {.plan = {.mult = 1}});
  demand(prefetcher, 0, {1, 2});
  ASSERT_TRUE(prefetcher.wants_output(layer(0), 1));
  prefetcher.see_output(layer(0), row_for(7, 9).data(), 1, kExperts);
  prefetcher.drain();
  EXPECT_EQ(counters().submitted, 2u);
  demand(prefetcher, 1, {7, 9});
  EXPECT_EQ(counters().taken(), 2u);
  EXPECT_FALSE(prefetcher.wants_output(layer(2), 1));  // nothing above the last layer
  EXPECT_FALSE(prefetcher.wants_output(layer(0), Prefetcher::kRowsMax + 1));
}

TEST_F(PrefetcherTest, TheInputOfABlockServesUntilAnOutputIsSeen) {
  Prefetcher prefetcher(*loader_, identity_lenses(*model_), {.plan = {.mult = 1}});
  demand(prefetcher, 0, {1, 2});
  std::vector<float> input = row_for(4, 5);
  for (float& value : input) value *= 2;  // the norm's weight
  prefetcher.see_block(layer(0), input.data(), 1, kExperts);
  prefetcher.drain();
  demand(prefetcher, 1, {4, 5});
  EXPECT_EQ(counters().taken(), 2u);
  prefetcher.see_output(layer(1), row_for(1, 2).data(), 1, kExperts);
  prefetcher.see_block(layer(0), input.data(), 1, kExperts);
  prefetcher.drain();
  EXPECT_EQ(counters().predicted, 4u);
}

TEST_F(PrefetcherTest, APromptStreamsTheNextLayerInOrder) {
  Prefetcher prefetcher(*loader_, identity_lenses(*model_), {.plan = {.mult = 1}});
  std::vector<uint32_t> most(kExperts / 2);
  for (uint32_t i = 0; i < most.size(); ++i) most[i] = 2 * i;
  demand(prefetcher, 0, most, 100);
  const PrefetchCounters after = counters();
  EXPECT_GT(after.submitted, 0u);
  EXPECT_LT(after.submitted, kExperts);  // no more than the side region holds
  std::vector<uint32_t> first(after.submitted);
  for (uint32_t i = 0; i < first.size(); ++i) first[i] = i;
  demand(prefetcher, 1, first, 100);
  EXPECT_EQ(counters().taken(), after.submitted);
}

TEST_F(PrefetcherTest, GovernedItBeginsOff) {
  Prefetcher prefetcher(*loader_, identity_lenses(*model_), {.governed = true});
  EXPECT_FALSE(prefetcher.wants_output(layer(0), 1));
  bool seen = false;
  for (int pass = 0; pass < 200; ++pass) {
    for (size_t source = 0; source < 3; ++source) demand(prefetcher, source, {1, 2});
    seen |= prefetcher.wants_output(layer(0), 1);
  }
  EXPECT_TRUE(seen);
  EngineStats stats;
  prefetcher.add_stats(stats);
  EXPECT_GE(stats.prefetch_trials, 1u);
  EXPECT_GT(stats.prefetch_lens_bytes, 0u);
}

TEST_F(PrefetcherTest, RowsThatComeTooFastAreDropped) {
  Prefetcher prefetcher(*loader_, identity_lenses(*model_), {.plan = {.mult = 1}});
  for (int i = 0; i < 1000; ++i) prefetcher.see_output(layer(0), row_for(7, 9).data(), 1, kExperts);
  prefetcher.drain();
  EngineStats stats;
  prefetcher.add_stats(stats);
  EXPECT_EQ(stats.prefetch_rows_dropped + counters().predicted / 2, 1000u);
}

}  // namespace
}  // namespace sluice
