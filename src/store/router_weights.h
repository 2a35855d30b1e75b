// A layer's router as its files hold it, in floats: the matrix, its biases, the norm before it, and how the
// architecture turns logits into a choice. Read once, for predictions (predict/router_lens.h); the model's own routing
// is llama.cpp's.
//
// Names    blk.N.ffn_gate_inp.{weight,bias}, blk.N.exp_probs_b.bias; the norm is blk.N.ffn_norm, or, where there is
// none,
//          blk.N.post_attention_norm. A norm is LayerNorm when the metadata knows only layer_norm_epsilon, else RMS.
// Scores   expert_gating_func, with llama.cpp's numbers. Without that key: sigmoid where there is a selection bias or
//          the architecture is known for it, else softmax. A wrong guess spoils predictions, never results.
// Errors   kNotFound: the layer has no router or norm under those names. kUnsupported: a type or shape that this reader
//          does not know. kBadFile, kShortRead, kDeviceError from reading.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "store/catalog.h"

namespace sluice {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSoftmaxOfTopK, kSqrtSoftplus };

struct RouterWeights {
  uint32_t layer = 0;
  uint32_t n_embd = 0;
  uint32_t n_expert = 0;
  uint32_t top_k = 0;
  uint32_t n_group = 0;  // 0 or 1: no groups
  uint32_t n_group_used = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool layer_norm = false;  // with the mean taken off
  float epsilon = 0;
  std::vector<float> matrix;          // [n_expert][n_embd]
  std::vector<float> bias;            // [n_expert] of the logits; may be empty
  std::vector<float> selection_bias;  // [n_expert] added to the scores for choosing only; may be empty
  std::vector<float> norm_weight;     // [n_embd]
  std::vector<float> norm_bias;       // [n_embd]; may be empty
};

Result<RouterWeights> read_router_weights(const Catalog& catalog, uint32_t layer);

}  // namespace sluice
