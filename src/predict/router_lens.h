// A router lens: a layer's own norm and router applied to an earlier state of the residual stream, to guess which
// experts the layer will choose before it is reached. Pure computation; knows no slots, reads no file.
//
// Input    one row [n_embd] of the residual stream, from before the layer's attention (the output of an earlier layer).
//          Where only the normalised input of an earlier block is seen, undo_norm gives the row back up to its scale,
//          which the norm takes away again.
// Result   experts by falling selection score, with that score: what the architecture chooses by (probability, plus the
//          selection bias where there is one). Experts of groups that are not chosen are left out. Scores are
//          comparable within a layer, not between score functions.
// Exact    a guess. The matrix is kept as bfloat16, half the bytes, and sums are taken in another order than ggml's.
// Cost     rank reads n_expert * n_embd * 2 bytes and computes as many multiply-adds; nothing is allocated once the
//          scratch has grown.
// Threads  const lens; one scratch for each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/router_weights.h"

namespace sluice {

struct ExpertScore {
  uint32_t expert = 0;
  float score = 0;
};

class RouterLens {
 public:
  struct Scratch {
    std::vector<float> row;     // normalised
    std::vector<float> scores;  // [n_expert]
    std::vector<uint32_t> order;
  };

  explicit RouterLens(const RouterWeights& weights);

  // The `count` best experts into `ranked`; fewer where groups leave fewer.
  void rank(std::span<const float> residual, uint32_t count, Scratch& scratch, std::vector<ExpertScore>& ranked) const;
  // `input` is what this layer's norm made of a row; `row` becomes that row, but for its scale.
  void undo_norm(std::span<const float> input, std::vector<float>& row) const;

  uint32_t layer() const { return layer_; }
  uint32_t n_embd() const { return n_embd_; }
  uint32_t n_expert() const { return n_expert_; }
  uint32_t top_k() const { return top_k_; }
  size_t bytes() const { return matrix_.size() * sizeof(uint16_t); }

 private:
  void normalise(std::span<const float> residual, std::vector<float>& row) const;
  void score(std::span<float> logits) const;
  void mask_groups(std::span<float> scores, std::vector<uint32_t>& order) const;

  uint32_t layer_;
  uint32_t n_embd_;
  uint32_t n_expert_;
  uint32_t top_k_;
  uint32_t n_group_;
  uint32_t n_group_used_;
  RouterScore score_;
  bool layer_norm_;
  float epsilon_;
  std::vector<uint16_t> matrix_;  // [n_expert][n_embd], bfloat16
  std::vector<float> bias_;
  std::vector<float> selection_bias_;
  std::vector<float> norm_weight_;
  std::vector<float> norm_bias_;
};

}  // namespace sluice
