// What a synthetic model shall look like: one plain value, filled from the command line, checked once.
// Not the tensors themselves: make_model/plan.h derives those.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace sluice::make_model {

enum class Arch { kQwen3Moe, kQwen3Next, kDeepseek2, kGptOss, kLlama };

// The name under `general.architecture`, which is also the option's value.
const char* arch_name(Arch arch);
Result<Arch> parse_arch(std::string_view name);

struct ModelSpec {
  Arch arch = Arch::kQwen3Moe;
  uint32_t n_layer = 4;
  uint32_t n_layer_dense = 0;  // the first layers have a dense FFN (deepseek2 only)
  uint32_t width = 256;        // elements of the residual stream
  uint32_t ff = 256;           // inner width of one expert
  uint32_t n_expert = 16;
  uint32_t n_expert_used = 4;
  uint32_t n_expert_shared = 0;
  uint32_t n_group = 1;  // expert groups, 1 = none (deepseek2 only)
  uint32_t n_group_used = 1;
  uint32_t n_head = 4;
  uint32_t n_head_kv = 2;
  uint32_t head_dim = 64;
  uint32_t context = 4096;

  std::vector<ggml_type> expert_types;  // layer i takes number i modulo their count; never empty
  std::optional<ggml_type> down_type;   // for the down matrices of every layer, instead of the layer's own
  ggml_type dense_type = GGML_TYPE_Q8_0;

  bool gate_up_fused = false;
  bool expert_scales = false;
  float router_skew = 0.0F;
  uint64_t seed = 1;

  ggml_type gate_type(uint32_t layer) const { return expert_types[layer % expert_types.size()]; }
  ggml_type down_type_of(uint32_t layer) const { return down_type.value_or(gate_type(layer)); }
};

// kBadArgument names the option, what was wanted and what was given.
Status check_spec(const ModelSpec& spec);

}  // namespace sluice::make_model
