#include "cli/budget_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/assert.h"
#include "ggml-cpp.h"
#include "gguf.h"

namespace sluice {

namespace {

constexpr uint32_t kContextTokensDefault = 4096;
// 5 %, and of little memory more: what nobody counted does not shrink with it.
constexpr uint64_t kReserveDivisor = 20;
constexpr uint64_t kReserveBytesMin = 256 * kMiB;
constexpr uint64_t kReserveMinDivisor = 8;
// The least that a budget which was asked for leaves free.
constexpr uint64_t kFitReserveBytesMin = 16 * kMiB;
constexpr uint64_t kFitReserveDivisor = 32;

// Unsigned integers of a model's metadata, whatever width they were written with.
class Metadata {
 public:
  Metadata(const gguf_context* gguf, std::string architecture) : gguf_(gguf), architecture_(std::move(architecture)) {}

  // Keys of the architecture: "qwen3moe." + name. A per-layer array gives its entries, a scalar one entry.
  std::vector<uint64_t> values(const std::string& name) const {
    const int64_t key = gguf_find_key(gguf_, (architecture_ + "." + name).c_str());
    if (key < 0) return {};
    const gguf_type type = gguf_get_kv_type(gguf_, key);
    if (type == GGUF_TYPE_UINT32) return {gguf_get_val_u32(gguf_, key)};
    if (type == GGUF_TYPE_INT32) return {static_cast<uint64_t>(std::max(0, gguf_get_val_i32(gguf_, key)))};
    if (type == GGUF_TYPE_UINT64) return {gguf_get_val_u64(gguf_, key)};
    if (type != GGUF_TYPE_ARRAY) return {};
    const gguf_type element = gguf_get_arr_type(gguf_, key);
    if (element != GGUF_TYPE_UINT32 && element != GGUF_TYPE_INT32) return {};
    const auto* data = static_cast<const int32_t*>(gguf_get_arr_data(gguf_, key));
    std::vector<uint64_t> all;
    for (size_t i = 0; i < gguf_get_arr_n(gguf_, key); ++i) all.push_back(static_cast<uint64_t>(std::max(0, data[i])));
    return all;
  }

  uint32_t largest(const std::string& name) const {
    const std::vector<uint64_t> all = values(name);
    const uint64_t value = all.empty() ? 0 : *std::max_element(all.begin(), all.end());
    return static_cast<uint32_t>(std::min<uint64_t>(value, UINT32_MAX));
  }

 private:
  const gguf_context* gguf_;
  std::string architecture_;
};

uint64_t saturating_sub(uint64_t a, uint64_t b) {
  return a > b ? a - b : 0;
}

}  // namespace

Result<ContextShape> read_context_shape(const std::string& path) {
  const gguf_init_params params = {.no_alloc = true, .ctx = nullptr};
  const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), params));
  if (!gguf) return make_error(ErrorCode::kBadFile, "'{}': no readable GGUF metadata", path);
  const int64_t architecture_key = gguf_find_key(gguf.get(), "general.architecture");
  if (architecture_key < 0 || gguf_get_kv_type(gguf.get(), architecture_key) != GGUF_TYPE_STRING) {
    return make_error(ErrorCode::kBadFile, "'{}': no general.architecture", path);
  }
  const Metadata metadata(gguf.get(), gguf_get_val_str(gguf.get(), architecture_key));

  ContextShape shape;
  shape.n_ctx_train = metadata.largest("context_length");
  shape.n_layer = metadata.largest("block_count");
  shape.n_embd = metadata.largest("embedding_length");
  shape.n_head = metadata.largest("attention.head_count");
  shape.n_ff = metadata.largest("feed_forward_length");
  shape.n_ff_expert = metadata.largest("expert_feed_forward_length");
  shape.n_expert = metadata.largest("expert_count");
  shape.n_expert_used = metadata.largest("expert_used_count");
  const int64_t vocabulary_key = gguf_find_key(gguf.get(), "tokenizer.ggml.tokens");
  if (vocabulary_key >= 0 && gguf_get_kv_type(gguf.get(), vocabulary_key) == GGUF_TYPE_ARRAY) {
    shape.n_vocab = static_cast<uint32_t>(gguf_get_arr_n(gguf.get(), vocabulary_key));
  }

  const uint64_t head_values = shape.n_head == 0 ? 0 : shape.n_embd / shape.n_head;
  const uint64_t key_values = metadata.largest("attention.key_length");
  const uint64_t value_values = metadata.largest("attention.value_length");
  const uint64_t per_head = (key_values ? key_values : head_values) + (value_values ? value_values : head_values);
  const std::vector<uint64_t> heads = metadata.values("attention.head_count_kv");
  for (uint32_t layer = 0; layer < shape.n_layer; ++layer) {
    const uint64_t n_head_kv = heads.empty() ? shape.n_head : heads[std::min<size_t>(layer, heads.size() - 1)];
    shape.kv_values_per_token += n_head_kv * per_head;
  }
  return shape;
}

uint32_t default_context_tokens(const ContextShape& shape) {
  return shape.n_ctx_train == 0 ? kContextTokensDefault : std::min(shape.n_ctx_train, kContextTokensDefault);
}

ContextBytes estimate_context_bytes(const ContextShape& shape, uint32_t context_tokens, uint32_t ubatch_tokens) {
  // llama.cpp pads the cache to whole 256-token blocks.
  const uint64_t cache_tokens = align_up(context_tokens, 256);
  const uint64_t batch = std::min(context_tokens, ubatch_tokens);

  // Live at once in a graph: a few rows as wide as the residual stream, the widest FFN's two halves, the chosen
  // experts' rows, the router's scores and the attention mask in both its types. Measured compute buffers lie below.
  const uint64_t row_values =
      12 * uint64_t{shape.n_embd} + 3 * uint64_t{shape.n_ff} +
      uint64_t{shape.n_expert_used} * (2 * uint64_t{shape.n_embd} + 3 * uint64_t{shape.n_ff_expert}) +
      3 * uint64_t{shape.n_expert} + 2 * cache_tokens;
  ContextBytes bytes;
  bytes.kv = cache_tokens * shape.kv_values_per_token * 2;
  bytes.compute = batch * row_values * 4 + uint64_t{shape.n_vocab} * 8;
  return bytes;
}

Result<BudgetPlan> plan_budget(const BudgetInputs& inputs) {
  const bool available_known = inputs.available_bytes != kAvailableUnknown;
  SLUICE_ASSERT(available_known || inputs.spec.kind != BudgetSpec::Kind::kAuto, "automatic budget of unknown memory");
  BudgetPlan plan;
  plan.inputs = inputs;
  if (available_known) {
    plan.reserve_bytes = std::max(inputs.available_bytes / kReserveDivisor,
                                  std::min(kReserveBytesMin, inputs.available_bytes / kReserveMinDivisor));
  }
  plan.left_bytes = inputs.available_bytes;
  for (uint64_t used : {inputs.dense_bytes, inputs.context.kv, inputs.context.compute, plan.reserve_bytes}) {
    plan.left_bytes = saturating_sub(plan.left_bytes, used);
  }
  const uint64_t rest_bytes = inputs.dense_bytes + inputs.context.kv + inputs.context.compute;
  if (available_known && rest_bytes > inputs.available_bytes) {
    return make_error(ErrorCode::kNoMemory, "a context of {} tokens does not fit: dense weights {}, KV cache {} and computation {} against {} of free memory; -c takes a smaller one",
                      inputs.context_tokens, format_bytes(inputs.dense_bytes), format_bytes(inputs.context.kv), format_bytes(inputs.context.compute),
                      format_bytes(inputs.available_bytes));
  }
  // Of very small experts the least number of slots and staging buffers takes more than all experts' bytes.
  const uint64_t all_bytes = std::max(inputs.expert_bytes, inputs.budget_bytes_min);
  switch (inputs.spec.kind) {
    case BudgetSpec::Kind::kAuto: plan.budget_bytes = std::min(plan.left_bytes, all_bytes); break;
    case BudgetSpec::Kind::kBytes: plan.budget_bytes = inputs.spec.bytes; break;
    case BudgetSpec::Kind::kPercent:
      plan.budget_bytes =
          static_cast<uint64_t>(std::llround(static_cast<double>(inputs.expert_bytes) * inputs.spec.percent / 100.0));
      if (inputs.spec.percent >= 100) plan.budget_bytes = all_bytes;
      break;
  }
  if (inputs.fit && available_known && inputs.spec.kind != BudgetSpec::Kind::kAuto) {
    const uint64_t reserve = std::max(inputs.available_bytes / kFitReserveDivisor, kFitReserveBytesMin);
    const uint64_t fits = saturating_sub(inputs.available_bytes, rest_bytes + reserve);
    if (plan.budget_bytes > fits && plan.budget_bytes >= inputs.budget_bytes_min) {
      if (fits < inputs.budget_bytes_min) {
        return make_error(ErrorCode::kNoMemory,
                          "a budget of {} does not fit: free memory leaves {} for experts, this model needs at least {} "
                          "({} bytes); --fit off takes the budget as it is",
                          format_bytes(plan.budget_bytes), format_bytes(fits), format_bytes(inputs.budget_bytes_min),
                          inputs.budget_bytes_min);
      }
      plan.asked_bytes = plan.budget_bytes;
      plan.budget_bytes = fits;
    }
  }
  if (plan.budget_bytes < inputs.budget_bytes_min) {
    const char* source = inputs.spec.kind == BudgetSpec::Kind::kAuto ? "free memory leaves" : "given";
    return make_error(ErrorCode::kNoMemory,
                      "the expert budget is too small: needed at least {} ({} bytes), {} {} ({} bytes)",
                      format_bytes(inputs.budget_bytes_min), inputs.budget_bytes_min, source,
                      format_bytes(plan.budget_bytes), plan.budget_bytes);
  }
  return plan;
}

Result<UbatchChoice> choose_ubatch(BudgetInputs inputs, const ContextShape& shape, uint32_t batch_tokens) {
  const auto plan_for = [&](uint32_t ubatch_tokens) {
    inputs.context = estimate_context_bytes(shape, inputs.context_tokens, ubatch_tokens);
    return plan_budget(inputs);
  };
  const Result<BudgetPlan> plan = plan_for(kUbatchTokens);
  if (!plan) return plan.error();
  UbatchChoice choice{.ubatch_tokens = kUbatchTokens, .plan = *plan};
  if (plan->budget_bytes >= inputs.expert_bytes) return choice;
  const uint32_t useful_tokens = std::min({kUbatchTokensMax, batch_tokens, inputs.context_tokens});
  for (uint32_t ubatch_tokens = kUbatchTokensMax; ubatch_tokens > kUbatchTokens; ubatch_tokens /= 2) {
    if (ubatch_tokens > useful_tokens) continue;
    const Result<BudgetPlan> larger = plan_for(ubatch_tokens);
    if (!larger || budget_exceeds_memory(*larger)) continue;
    if (larger->budget_bytes < plan->budget_bytes - plan->budget_bytes / 8) continue;
    return UbatchChoice{.ubatch_tokens = ubatch_tokens, .plan = *larger};
  }
  return choice;
}

std::vector<std::string> budget_table(const BudgetPlan& plan) {
  const BudgetInputs& inputs = plan.inputs;
  auto line = [](const char* sign, const char* what, uint64_t bytes) {
    return fmt::format("{:1} {:<28}{:>12}", sign, what, format_bytes(bytes));
  };
  std::vector<std::string> table;
  if (inputs.available_bytes != kAvailableUnknown) {
    table.push_back(line("", "memory available", inputs.available_bytes));
    table.push_back(line("-", "dense weights", inputs.dense_bytes));
    table.push_back(line("-", "context (KV, at most)", inputs.context.kv));
    table.push_back(line("-", "compute (estimate)", inputs.context.compute));
    table.push_back(line("-", "reserve", plan.reserve_bytes));
    table.push_back(line("=", "left for experts", plan.left_bytes));
  }
  table.push_back(line("", "all experts", inputs.expert_bytes));
  table.push_back(line("", "smallest budget that works", inputs.budget_bytes_min));
  table.push_back(line(">", "budget", plan.budget_bytes));
  return table;
}

}  // namespace sluice
