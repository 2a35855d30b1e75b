// The memory sum that is made before a model is loaded: what there is, what everything but the expert pool will need,
// and what is left for the pool. Pure, except for read_context_shape; sets nothing (the engine is told the result).
//
// Sum      available - dense weights - context - reserve = left for the pool; an automatic budget is that, at most
//          all experts. Context is an estimate from above: every layer is counted with a full KV cache.
// Fit      a budget that was asked for and that memory cannot hold would be paid for by the kernel's reclaim, with
//          another part of the model: it is made smaller, with a small reserve, or refused.
// Units    bytes.
// Errors   kNoMemory when less than the engine's smallest budget is left or asked for, with needed and given bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"

namespace sluice {

// What the size of a context depends on, from a model's metadata.
struct ContextShape {
  uint32_t n_ctx_train = 0;
  uint32_t n_layer = 0;
  uint32_t n_embd = 0;
  uint32_t n_head = 0;
  uint64_t kv_values_per_token = 0;  // keys and values of all layers
  uint32_t n_ff = 0;                 // the widest dense FFN
  uint32_t n_ff_expert = 0;
  uint32_t n_expert = 0;
  uint32_t n_expert_used = 0;
  uint32_t n_vocab = 0;
};

// Keys that a model lacks count as zero. kBadFile when the file has no readable GGUF metadata.
Result<ContextShape> read_context_shape(const std::string& path);

// The context's length when none was asked for.
uint32_t default_context_tokens(const ContextShape& shape);

struct ContextBytes {
  uint64_t kv = 0;       // 16-bit keys and values, recurrent states
  uint64_t compute = 0;  // activations of one ubatch, with one row of logits
};
ContextBytes estimate_context_bytes(const ContextShape& shape, uint32_t context_tokens, uint32_t ubatch_tokens);

// Stands for what this system does not tell; only a budget that was asked for can be planned with it.
inline constexpr uint64_t kAvailableUnknown = UINT64_MAX;

struct BudgetInputs {
  BudgetSpec spec;
  uint64_t available_bytes = kAvailableUnknown;
  uint64_t dense_bytes = 0;
  uint32_t context_tokens = 0;
  ContextBytes context;  // of that many tokens
  uint64_t expert_bytes = 0;
  uint64_t budget_bytes_min = 0;
  bool fit = true;  // false: a budget that was asked for is taken as it is
};

// Prompt tokens computed at once, where nobody says how many: kUbatchTokens when the pool holds all experts. Otherwise
// each batch reads the experts it needs once per layer, so a larger one reads fewer bytes per token: the largest power of
// two up to kUbatchTokensMax, batch and context that fits in memory and costs an automatic budget at most an eighth.
inline constexpr uint32_t kUbatchTokens = 512;
inline constexpr uint32_t kUbatchTokensMax = 2048;

struct BudgetPlan {
  BudgetInputs inputs;
  uint64_t reserve_bytes =
      0;  // 5 % of what is available, at least 256 MiB or an eighth: for the system and what nobody counted
  uint64_t left_bytes = 0;  // for the pool; 0 when the rest needs more than there is
  uint64_t budget_bytes = 0;
  uint64_t asked_bytes = 0;  // what was asked for, where the budget was made smaller to fit; else 0
};

Result<BudgetPlan> plan_budget(const BudgetInputs& inputs);

// True when a budget that was asked for takes from the reserve, or more than there is where it was not to fit.
inline bool budget_exceeds_memory(const BudgetPlan& plan) {
  return plan.budget_bytes > plan.left_bytes;
}

// `inputs` with the context that `shape` needs for the micro-batch that is chosen.
struct UbatchChoice {
  uint32_t ubatch_tokens = 0;
  BudgetPlan plan;
};
Result<UbatchChoice> choose_ubatch(BudgetInputs inputs, const ContextShape& shape, uint32_t batch_tokens);

// The sum, one line per term.
std::vector<std::string> budget_table(const BudgetPlan& plan);

}  // namespace sluice
