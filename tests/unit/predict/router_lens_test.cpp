#include "predict/router_lens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace sluice {
namespace {

// The slow, obvious twin, in double: llama.cpp's build_moe_ffn as its text reads.
std::vector<ExpertScore> reference(const RouterWeights& w, const std::vector<float>& residual, uint32_t count) {
  double mean = 0;
  for (const float value : residual) mean += value;
  mean = w.layer_norm ? mean / w.n_embd : 0;
  double squares = 0;
  for (const float value : residual) squares += (value - mean) * (value - mean);
  const double root = std::sqrt(squares / w.n_embd + w.epsilon);
  std::vector<double> scores(w.n_expert);
  for (uint32_t e = 0; e < w.n_expert; ++e) {
    for (uint32_t i = 0; i < w.n_embd; ++i) {
      double x = (residual[i] - mean) / root * w.norm_weight[i];
      if (!w.norm_bias.empty()) x += w.norm_bias[i];
      scores[e] += x * w.matrix[size_t{e} * w.n_embd + i];
    }
    if (!w.bias.empty()) scores[e] += w.bias[e];
  }
  double sum = 0;
  for (const double logit : scores) sum += std::exp(logit);
  for (double& value : scores) {
    if (w.score == RouterScore::kSoftmax) value = std::exp(value) / sum;
    if (w.score == RouterScore::kSigmoid) value = 1 / (1 + std::exp(-value));
    if (w.score == RouterScore::kSqrtSoftplus) value = std::sqrt(std::log(1 + std::exp(value)));
  }
  for (uint32_t e = 0; e < w.n_expert && !w.selection_bias.empty(); ++e) scores[e] += w.selection_bias[e];
  std::vector<bool> allowed(w.n_expert, true);
  if (w.n_group > 1) {
    const uint32_t size = w.n_expert / w.n_group;
    std::vector<std::pair<double, uint32_t>> groups;
    for (uint32_t g = 0; g < w.n_group; ++g) {
      std::vector<double> own(scores.begin() + g * size, scores.begin() + (g + 1) * size);
      std::sort(own.rbegin(), own.rend());
      groups.emplace_back(-(own[0] + own[1]), g);
    }
    std::sort(groups.begin(), groups.end());
    for (uint32_t i = w.n_group_used; i < w.n_group; ++i) {
      for (uint32_t e = 0; e < size; ++e) allowed[groups[i].second * size + e] = false;
    }
  }
  std::vector<ExpertScore> ranked;
  for (uint32_t e = 0; e < w.n_expert; ++e) {
    if (allowed[e]) ranked.push_back({e, static_cast<float>(scores[e])});
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](auto& a, auto& b) { return a.score > b.score; });
  ranked.resize(std::min<size_t>(ranked.size(), count));
  return ranked;
}

float rounded_to_bfloat16(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(fraction * 256), exponent - 8);
}

class RandomRouter {
 public:
  explicit RandomRouter(uint64_t seed) : random_(seed) {}

  // Weights that bfloat16 holds exactly, so that the twin differs by the order of its sums alone.
  RouterWeights make(uint32_t n_embd, uint32_t n_expert) {
    RouterWeights weights{.layer = 3, .n_embd = n_embd, .n_expert = n_expert, .top_k = 4, .epsilon = 1e-5f};
    for (float& value : row(weights.matrix, size_t{n_embd} * n_expert)) value = rounded_to_bfloat16(value * 0.2f);
    for (float& value : row(weights.norm_weight, n_embd)) value += 1.5f;
    return weights;
  }
  std::vector<float>& row(std::vector<float>& values, size_t count) {
    values.resize(count);
    for (float& value : values) value = normal_(random_);
    return values;
  }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

void expect_same(const RouterWeights& weights, const std::vector<float>& residual, uint32_t count) {
  const RouterLens lens(weights);
  RouterLens::Scratch scratch;
  std::vector<ExpertScore> ranked;
  lens.rank(residual, count, scratch, ranked);
  const auto expected = reference(weights, residual, count);
  ASSERT_EQ(ranked.size(), expected.size());
  for (size_t i = 0; i < ranked.size(); ++i) {
    EXPECT_NEAR(ranked[i].score, expected[i].score, 2e-4) << i;
    if (ranked[i].expert == expected[i].expert) continue;
    // Only a tie within the tolerance may stand in another order.
    const bool tied = std::any_of(expected.begin(), expected.end(), [&](const ExpertScore& other) {
      return other.expert == ranked[i].expert && std::abs(other.score - expected[i].score) < 2e-4f;
    });
    EXPECT_TRUE(tied || i + 1 == ranked.size()) << "place " << i << ": " << ranked[i].expert;
  }
}

TEST(RouterLens, EqualsThePlainReference) {
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSoftmaxOfTopK, RouterScore::kSqrtSoftplus}) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      RandomRouter random(seed);
      const uint32_t n_embd = seed % 2 == 0 ? 352 : 37;  // with and without a rest behind the last whole vector
      RouterWeights weights = random.make(n_embd, 24);
      weights.score = score;
      weights.layer_norm = seed % 3 == 0;
      if (seed % 3 == 0) random.row(weights.norm_bias, n_embd);
      if (seed % 5 == 0) random.row(weights.bias, 24);
      if (seed % 4 == 0) random.row(weights.selection_bias, 24);
      if (seed % 7 < 3) weights.n_group = 4, weights.n_group_used = 2;
      std::vector<float> residual;
      for (float& value : random.row(residual, n_embd)) value = value * 3 + 1;
      SCOPED_TRACE(fmt::format("score {} seed {}", static_cast<int>(score), seed));
      expect_same(weights, residual, 10);
    }
  }
}

TEST(RouterLens, SelectionBiasChangesTheChoiceAndGroupsCutIt) {
  RouterWeights weights{.n_embd = 1, .n_expert = 4, .top_k = 1, .score = RouterScore::kSigmoid, .epsilon = 0};
  weights.matrix = {4, 3, 2, 1};
  weights.norm_weight = {1};
  RouterLens::Scratch scratch;
  std::vector<ExpertScore> ranked;
  const std::vector<float> row = {7};
  RouterLens(weights).rank(row, 1, scratch, ranked);
  EXPECT_EQ(ranked.at(0).expert, 0u);
  weights.selection_bias = {0, 0, 0, 1};
  RouterLens(weights).rank(row, 1, scratch, ranked);
  EXPECT_EQ(ranked.at(0).expert, 3u);
  weights.selection_bias.clear();
  weights.n_group = 2;
  weights.n_group_used = 1;
  RouterLens(weights).rank(row, 4, scratch, ranked);
  ASSERT_EQ(ranked.size(), 2u);  // the other group's experts cannot be chosen
  EXPECT_EQ(ranked[1].expert, 1u);
}

TEST(RouterLens, UndoneNormGivesTheSameRanking) {
  RandomRouter random(5);
  RouterWeights below = random.make(64, 16);
  RouterWeights target = random.make(64, 16);
  std::vector<float> residual;
  random.row(residual, 64);
  double squares = 0;
  for (const float value : residual) squares += value * value;
  std::vector<float> input(64);  // what the layer below makes of the row
  for (size_t i = 0; i < 64; ++i) {
    input[i] = static_cast<float>(residual[i] / std::sqrt(squares / 64 + 1e-5) * below.norm_weight[i]);
  }
  RouterLens::Scratch scratch;
  std::vector<ExpertScore> direct;
  std::vector<ExpertScore> undone;
  std::vector<float> row;
  const RouterLens lens(target);
  lens.rank(residual, 16, scratch, direct);
  RouterLens(below).undo_norm(input, row);
  lens.rank(row, 16, scratch, undone);
  for (size_t i = 0; i < direct.size(); ++i) {
    EXPECT_EQ(direct[i].expert, undone[i].expert);
    EXPECT_NEAR(direct[i].score, undone[i].score, 1e-5);
  }
}

TEST(RouterLens, RowsOfNaNRankNothing) {
  RandomRouter random(1);
  const RouterLens lens(random.make(32, 8));
  RouterLens::Scratch scratch;
  std::vector<ExpertScore> ranked;
  lens.rank(std::vector<float>(32, std::numeric_limits<float>::quiet_NaN()), 8, scratch, ranked);
  EXPECT_TRUE(ranked.empty());
}

}  // namespace
}  // namespace sluice
