#include "predict/recall_probe.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace sluice {
namespace {

constexpr uint32_t kExperts = 8;

// A layer whose router reads the experts' scores straight from the row.
RouterLens identity_lens(uint32_t layer) {
  RouterWeights weights{.layer = layer, .n_embd = kExperts, .n_expert = kExperts, .top_k = 2, .epsilon = 1e-6f};
  weights.matrix.assign(size_t{kExperts} * kExperts, 0);
  for (uint32_t i = 0; i < kExperts; ++i) weights.matrix[size_t{i} * kExperts + i] = 1;
  weights.norm_weight.assign(kExperts, 1);
  return RouterLens(weights);
}

std::shared_ptr<const LensSet> lenses_of(std::vector<uint32_t> layers) {
  std::vector<RouterLens> lenses;
  for (const uint32_t layer : layers) lenses.push_back(identity_lens(layer));
  return std::make_shared<const LensSet>(std::move(lenses));
}

RecallCounts find(const std::vector<RecallCounts>& all, PredictionView view, uint32_t distance, uint32_t layer) {
  for (const RecallCounts& counts : all) {
    if (counts.view == view && counts.distance == distance && counts.layer == layer) return counts;
  }
  return {};
}

TEST(RecallProbe, CountsWhatEachViewForesaw) {
  RecallProbe probe(lenses_of({1, 3, 4}));  // layers 0 and 2 have no experts
  // Best first: 7, 6, 5, 4, ...
  const std::vector<float> row = {0, 1, 2, 3, 4, 5, 6, 7};
  probe.see_output(0, row.data(), 1, kExperts);
  const std::vector<int32_t> chosen1 = {7, 5};  // places 0 and 2
  probe.see_block(1, row.data(), 1, kExperts, chosen1, 2);
  const std::vector<int32_t> chosen3 = {4, 0};  // places 3 and 7
  probe.see_block(3, nullptr, 1, kExperts, chosen3, 2);

  const auto all = probe.counts();
  const RecallCounts one = find(all, PredictionView::kBeforeAttention, 1, 1);
  EXPECT_EQ(one.wanted, 2u);
  EXPECT_EQ(one.found_at_1x, 1u);
  EXPECT_EQ(one.found_at_1_5x, 2u);
  EXPECT_EQ(one.found_at_2x, 2u);
  const RecallCounts two = find(all, PredictionView::kBeforeAttention, 2, 3);
  EXPECT_EQ(two.wanted, 2u);
  EXPECT_EQ(two.found_at_1_5x, 0u);
  EXPECT_EQ(two.found_at_2x, 1u);
  const RecallCounts input = find(all, PredictionView::kBlockInput, 1, 3);
  EXPECT_EQ(input.wanted, 2u);
  EXPECT_EQ(input.found_at_2x, 1u);
  EXPECT_EQ(find(all, PredictionView::kBeforeAttention, 3, 4).wanted, 0u);  // layer 4 has not been there
}

TEST(RecallProbe, TheLastTokenIsTheBaseline) {
  RecallProbe probe(lenses_of({0}));
  const std::vector<int32_t> chosen = {0, 1, /**/ 1, 2, /**/ 0, 3};
  probe.see_block(0, nullptr, 3, kExperts, chosen, 2);
  // Second token: 1 was among the last two. Third: the last two were 1 and 2, before them 0.
  const RecallCounts last = find(probe.counts(), PredictionView::kLastToken, 0, 0);
  EXPECT_EQ(last.wanted, 4u);
  EXPECT_EQ(last.found_at_1x, 1u);
  EXPECT_EQ(last.found_at_1_5x, 2u);
  EXPECT_EQ(last.found_at_2x, 2u);
}

TEST(RecallProbe, ABatchOfOtherRowsIsLeftOut) {
  RecallProbe probe(lenses_of({0, 1}));
  const std::vector<float> rows(2 * kExperts, 1.0f);
  probe.see_output(0, rows.data(), 2, kExperts);
  const std::vector<int32_t> chosen = {0, 1};
  probe.see_block(1, nullptr, 1, kExperts, chosen, 2);                            // only one of the two rows went on
  probe.see_block(1, nullptr, 2, kExperts, std::vector<int32_t>{0, 1, 2, 3}, 2);  // and the prediction is used up
  EXPECT_EQ(find(probe.counts(), PredictionView::kBeforeAttention, 1, 1).wanted, 0u);
}

TEST(LensSet, DistancesCountLayersWithExperts) {
  const auto lenses = lenses_of({1, 3, 4});
  EXPECT_EQ(lenses->layer_above(0, 1), 1u);
  EXPECT_EQ(lenses->layer_above(1, 1), 3u);
  EXPECT_EQ(lenses->layer_above(2, 2), 4u);
  EXPECT_EQ(lenses->layer_above(4, 1), std::nullopt);
  EXPECT_EQ(lenses->layer_above(1, 3), std::nullopt);
  EXPECT_EQ(lenses->find(2), nullptr);
  EXPECT_EQ(lenses->bytes(), 3u * kExperts * kExperts * 2);
}

}  // namespace
}  // namespace sluice
