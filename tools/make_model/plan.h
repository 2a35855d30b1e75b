// The tensors and metadata of one architecture, as the pinned llama.cpp demands them: names, shapes, types, and how
// each tensor's weights are distributed. Holds no weights (make_model/weights.h makes them).
//
// Scales   Every matrix is scaled so that a unit-variance input gives a unit-variance output, and every sublayer adds
//          1/n_layer of the embedding's variance to the residual stream. So activations stay finite at any depth, the
//          residual stream changes slowly from layer to layer as it does in trained models, and attention and the
//          experts together outweigh the current token's embedding when the next one is chosen.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "make_model/spec.h"

namespace sluice::make_model {

// Weights are normal with this mean and deviation, each row times its factor; or exactly `values`, where given.
struct Distribution {
  float mean = 0.0F;
  float deviation = 0.0F;
  std::vector<float> row_factors;  // empty = all 1
  std::vector<float> values;       // empty = random
};

struct TensorPlan {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  std::vector<int64_t> shape;  // in ggml's order: the row's length first, the expert (if any) last
  Distribution distribution;
  bool of_experts = false;  // one slab per expert, index of the last dimension

  int64_t row_elements() const { return shape[0]; }
  int64_t row_count() const;
  uint64_t row_bytes() const { return ggml_row_size(type, row_elements()); }
  uint64_t bytes() const { return row_bytes() * static_cast<uint64_t>(row_count()); }
};

struct GgufFree {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufContext = std::unique_ptr<gguf_context, GgufFree>;

// What is taken over from an existing model.
struct Tokenizer {
  GgufContext keys;              // its tokenizer.* entries and nothing else
  std::vector<bool> is_control;  // [vocabulary]

  uint32_t vocab_size() const { return static_cast<uint32_t>(is_control.size()); }
};

// kNotFound or kBadFile name the file.
Result<Tokenizer> read_tokenizer(const std::string& path);

struct ModelPlan {
  GgufContext metadata;  // every key but split.*; no tensors
  std::vector<TensorPlan> tensors;

  uint64_t tensor_bytes() const;
};

// `spec` has passed check_spec.
ModelPlan plan_model(const ModelSpec& spec, const Tokenizer& tokenizer);

}  // namespace sluice::make_model
