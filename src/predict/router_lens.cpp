#include "predict/router_lens.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/assert.h"

namespace sluice {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr size_t kLanes = 16;
constexpr uint32_t kScoresOfGroup = 2;  // a group counts as much as its two best experts, as in DeepSeek's router

// To the nearest, ties to even.
uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float to_float(uint16_t value) {
  return std::bit_cast<float>(uint32_t{value} << 16);
}

// The compiler makes one version for each of these processors; the loader picks.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SLUICE_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SLUICE_VECTOR_CLONES
#endif

// logits[e] = matrix row e times row. Sums run in kLanes lanes, which is what lets the compiler use vectors.
SLUICE_VECTOR_CLONES void multiply(const uint16_t* matrix, const float* row, size_t n_embd, size_t n_expert,
                                   float* logits) {
  for (size_t expert = 0; expert < n_expert; ++expert) {
    const uint16_t* weights = matrix + expert * n_embd;
    float lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= n_embd; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += std::bit_cast<float>(uint32_t{weights[i + lane]} << 16) * row[i + lane];
      }
    }
    float sum = 0;
    for (const float lane : lanes) sum += lane;
    for (; i < n_embd; ++i) sum += to_float(weights[i]) * row[i];
    logits[expert] = sum;
  }
}

}  // namespace

RouterLens::RouterLens(const RouterWeights& weights)
    : layer_(weights.layer),
      n_embd_(weights.n_embd),
      n_expert_(weights.n_expert),
      top_k_(weights.top_k),
      n_group_(weights.n_group),
      n_group_used_(weights.n_group_used),
      score_(weights.score),
      layer_norm_(weights.layer_norm),
      epsilon_(weights.epsilon),
      bias_(weights.bias),
      selection_bias_(weights.selection_bias),
      norm_weight_(weights.norm_weight),
      norm_bias_(weights.norm_bias) {
  SLUICE_ASSERT(weights.matrix.size() == size_t{n_embd_} * n_expert_ && norm_weight_.size() == n_embd_,
                "layer {}: {} weights of a router {} x {}", layer_, weights.matrix.size(), n_expert_, n_embd_);
  SLUICE_ASSERT(n_group_ <= 1 || n_expert_ % n_group_ == 0, "{} experts in {} groups", n_expert_, n_group_);
  matrix_.reserve(weights.matrix.size());
  for (const float value : weights.matrix) matrix_.push_back(to_bfloat16(value));
}

void RouterLens::normalise(std::span<const float> residual, std::vector<float>& row) const {
  double mean = 0;
  if (layer_norm_) mean = std::accumulate(residual.begin(), residual.end(), 0.0) / n_embd_;
  double squares = 0;
  for (const float value : residual) squares += (value - mean) * (value - mean);
  const auto scale = static_cast<float>(1.0 / std::sqrt(squares / n_embd_ + static_cast<double>(epsilon_)));
  row.resize(n_embd_);
  for (size_t i = 0; i < n_embd_; ++i) row[i] = (residual[i] - static_cast<float>(mean)) * scale * norm_weight_[i];
  for (size_t i = 0; i < norm_bias_.size(); ++i) row[i] += norm_bias_[i];
}

void RouterLens::undo_norm(std::span<const float> input, std::vector<float>& row) const {
  SLUICE_ASSERT(input.size() == n_embd_, "a row of {}, wanted {}", input.size(), n_embd_);
  row.resize(n_embd_);
  for (size_t i = 0; i < n_embd_; ++i) {
    const float value = norm_bias_.empty() ? input[i] : input[i] - norm_bias_[i];
    row[i] = norm_weight_[i] == 0 ? 0 : value / norm_weight_[i];
  }
}

// Logits become what the layer chooses by.
void RouterLens::score(std::span<float> logits) const {
  switch (score_) {
    case RouterScore::kSoftmax: {
      const float greatest = *std::max_element(logits.begin(), logits.end());
      float sum = 0;
      for (float& value : logits) sum += value = std::exp(value - greatest);
      for (float& value : logits) value /= sum;
      break;
    }
    case RouterScore::kSigmoid:
      for (float& value : logits) value = 1 / (1 + std::exp(-value));
      break;
    case RouterScore::kSoftmaxOfTopK: break;  // chosen by the logits themselves
    case RouterScore::kSqrtSoftplus:
      for (float& value : logits) value = std::sqrt(value > 20 ? value : std::log1p(std::exp(value)));
      break;
  }
  for (size_t i = 0; i < selection_bias_.size(); ++i) logits[i] += selection_bias_[i];
}

// Experts of the groups that are not among the best become minus infinity.
void RouterLens::mask_groups(std::span<float> scores, std::vector<uint32_t>& order) const {
  const uint32_t group_size = n_expert_ / n_group_;
  std::vector<float> group_scores(n_group_);
  for (uint32_t group = 0; group < n_group_; ++group) {
    std::vector<float> best(scores.begin() + group * group_size, scores.begin() + (group + 1) * group_size);
    const size_t counted = std::min<size_t>(kScoresOfGroup, best.size());
    std::partial_sort(best.begin(), best.begin() + counted, best.end(), std::greater<>());
    group_scores[group] = std::accumulate(best.begin(), best.begin() + counted, 0.0f);
  }
  order.resize(n_group_);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return group_scores[a] > group_scores[b]; });
  for (uint32_t i = n_group_used_; i < n_group_; ++i) {
    const uint32_t group = order[i];
    std::fill(scores.begin() + group * group_size, scores.begin() + (group + 1) * group_size, kMinusInfinity);
  }
}

void RouterLens::rank(std::span<const float> residual, uint32_t count, Scratch& scratch,
                      std::vector<ExpertScore>& ranked) const {
  SLUICE_ASSERT(residual.size() == n_embd_, "a row of {}, wanted {}", residual.size(), n_embd_);
  normalise(residual, scratch.row);
  scratch.scores.resize(n_expert_);
  multiply(matrix_.data(), scratch.row.data(), n_embd_, n_expert_, scratch.scores.data());
  for (size_t i = 0; i < bias_.size(); ++i) scratch.scores[i] += bias_[i];
  score(scratch.scores);
  // A residual row of a model gone wrong may hold anything; the order below needs numbers.
  for (float& value : scratch.scores) {
    if (std::isnan(value)) value = kMinusInfinity;
  }
  if (n_group_ > 1) mask_groups(scratch.scores, scratch.order);

  scratch.order.resize(n_expert_);
  std::iota(scratch.order.begin(), scratch.order.end(), 0u);
  count = std::min(count, n_expert_);
  const std::vector<float>& scores = scratch.scores;
  std::partial_sort(scratch.order.begin(), scratch.order.begin() + count, scratch.order.end(),
                    [&](uint32_t a, uint32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  ranked.clear();
  for (uint32_t i = 0; i < count && scores[scratch.order[i]] > kMinusInfinity; ++i) {
    ranked.push_back({scratch.order[i], scores[scratch.order[i]]});
  }
}

}  // namespace sluice
