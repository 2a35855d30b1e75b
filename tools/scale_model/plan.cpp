#include "scale_model/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <string_view>
#include <utility>

namespace sluice::scale_model {
namespace {

// What a tensor's dimension counts: the sizes that grow, and all others.
enum class Axis { kKept, kHidden, kExpert, kShared };

// What a tensor's weights do to the stream's factor s.
enum class Effect { kNone, kWrites, kNormalises };

struct Rule {
  std::string_view name;  // without "blk.N." and ".weight"
  Axis row;
  Axis rows = Axis::kKept;
  Effect effect = Effect::kNone;
  int64_t group_count = 1;
};

// Of the architectures below, whose norms over the stream are RMSNorm without bias.
constexpr std::string_view kArchitectures[] = {"qwen3next", "qwen3moe"};
constexpr Rule kRules[] = {
    {"token_embd", Axis::kHidden, Axis::kKept, Effect::kWrites},
    {"output_norm", Axis::kHidden, Axis::kKept, Effect::kNormalises},
    {"output", Axis::kHidden},
    {"attn_norm", Axis::kHidden, Axis::kKept, Effect::kNormalises},
    {"post_attention_norm", Axis::kHidden, Axis::kKept, Effect::kNormalises},
    {"ffn_norm", Axis::kHidden, Axis::kKept, Effect::kNormalises},
    {"attn_q", Axis::kHidden},
    {"attn_k", Axis::kHidden},
    {"attn_v", Axis::kHidden},
    {"attn_qkv", Axis::kHidden},
    {"attn_gate", Axis::kHidden},
    {"attn_output", Axis::kKept, Axis::kHidden, Effect::kWrites},
    {"attn_q_norm", Axis::kKept},
    {"attn_k_norm", Axis::kKept},
    {"ssm_in", Axis::kHidden},
    {"ssm_ba", Axis::kHidden},
    {"ssm_conv1d", Axis::kKept},
    {"ssm_dt.bias", Axis::kKept},
    {"ssm_a", Axis::kKept},
    {"ssm_norm", Axis::kKept},
    {"ssm_out", Axis::kKept, Axis::kHidden, Effect::kWrites},
    {"ffn_gate_inp", Axis::kHidden},
    {"ffn_gate_exps", Axis::kHidden, Axis::kExpert},
    {"ffn_up_exps", Axis::kHidden, Axis::kExpert},
    {"ffn_gate_up_exps", Axis::kHidden, Axis::kExpert, Effect::kNone, 2},
    {"ffn_down_exps", Axis::kExpert, Axis::kHidden, Effect::kWrites},
    {"ffn_gate_exps.scale", Axis::kKept},
    {"ffn_up_exps.scale", Axis::kKept},
    {"ffn_down_exps.scale", Axis::kKept},
    {"ffn_gate_inp_shexp", Axis::kHidden},
    {"ffn_gate_shexp", Axis::kHidden, Axis::kShared},
    {"ffn_up_shexp", Axis::kHidden, Axis::kShared},
    {"ffn_down_shexp", Axis::kShared, Axis::kHidden, Effect::kWrites},
};

// "blk.12.attn_q.weight" -> "attn_q".
std::string_view rule_name(std::string_view name) {
  constexpr std::string_view kBlock = "blk.";
  constexpr std::string_view kWeight = ".weight";
  if (name.starts_with(kBlock)) {
    name.remove_prefix(kBlock.size());
    while (!name.empty() && std::isdigit(static_cast<unsigned char>(name.front()))) name.remove_prefix(1);
    if (name.starts_with('.')) name.remove_prefix(1);
  }
  if (name.ends_with(kWeight)) name.remove_suffix(kWeight.size());
  return name;
}

const Rule* find_rule(std::string_view name) {
  const Rule* rule = std::ranges::find(kRules, rule_name(name), &Rule::name);
  return rule == std::end(kRules) ? nullptr : rule;
}

struct Sizes {
  int64_t hidden = 0;
  int64_t expert = 0;
  int64_t shared = 0;  // 0: no shared expert

  int64_t of(Axis axis, int64_t kept) const {
    switch (axis) {
      case Axis::kHidden: return hidden;
      case Axis::kExpert: return expert;
      case Axis::kShared: return shared;
      case Axis::kKept: break;
    }
    return kept;
  }
};

const char* axis_option(Axis axis) {
  switch (axis) {
    case Axis::kHidden: return "--width-factor";
    case Axis::kExpert: return "--ff";
    case Axis::kShared: return "--shared-ff";
    case Axis::kKept: break;
  }
  return "the row";
}

// The model's own sizes, from the first tensor of each kind; the others are held against them later.
Result<Sizes> source_sizes(const Catalog& catalog) {
  Sizes sizes;
  bool has_output = false;
  for (const CatalogTensor& tensor : catalog.tensors) {
    const std::string_view name = rule_name(tensor.name);
    if (name == "token_embd") sizes.hidden = tensor.ne[0];
    if (name == "ffn_down_exps" && sizes.expert == 0) sizes.expert = tensor.ne[0];
    if (name == "ffn_down_shexp" && sizes.shared == 0) sizes.shared = tensor.ne[0];
    has_output = has_output || name == "output";
  }
  const std::string& path = catalog.files.front()->path();
  if (sizes.hidden == 0) return make_error(ErrorCode::kBadFile, "'{}' has no token_embd.weight", path);
  if (!has_output) {
    return make_error(ErrorCode::kUnsupported, "'{}' has no output.weight: a tied embedding cannot be scaled", path);
  }
  return sizes;
}

Status check_growth(const char* option, int64_t from, int64_t to) {
  if (to >= from) return {};
  return make_error(ErrorCode::kBadArgument, "{} must be at least the model's own {}, not {}", option, from, to);
}

Result<Sizes> wanted_sizes(const Sizes& from, const ScaleOptions& options) {
  if (options.shared_ff && from.shared == 0) {
    return make_error(ErrorCode::kBadArgument, "--shared-ff: the model has no shared expert");
  }
  const Sizes to = {.hidden = from.hidden * options.width_factor,
                    .expert = options.ff.value_or(from.expert),
                    .shared = options.shared_ff.value_or(from.shared)};
  if (Status ff = check_growth("--ff", from.expert, to.expert); !ff) return ff.error();
  if (Status shared = check_growth("--shared-ff", from.shared, to.shared); !shared) return shared.error();
  return to;
}

Result<TensorPlan> plan_tensor(const CatalogTensor& source, const Sizes& from, const Sizes& to,
                               const ScaleOptions& options) {
  const Rule* rule = find_rule(source.name);
  if (rule == nullptr) {
    return make_error(ErrorCode::kUnsupported, "tensor '{}' is not known to stay exact under padding",
                      printable(source.name));
  }
  if (source.ne[0] != from.of(rule->row, source.ne[0]) ||
      source.ne[1] != from.of(rule->rows, source.ne[1] / rule->group_count) * rule->group_count) {
    return make_error(ErrorCode::kUnsupported, "tensor '{}' has {} x {} weights, unlike the same one of other layers",
                      source.name, source.ne[0], source.ne[1]);
  }
  TensorPlan plan;
  plan.source = source;
  plan.type = parse_expert_tensor_name(source.name) ? options.type.value_or(source.type) : source.type;
  plan.group_count = rule->group_count;
  plan.slab_count = source.ne[2] * source.ne[3];
  plan.shape = {to.of(rule->row, source.ne[0]), to.of(rule->rows, source.ne[1] / rule->group_count) * rule->group_count,
                source.ne[2], source.ne[3]};
  const float stream = std::sqrt(static_cast<float>(options.width_factor));
  if (rule->effect == Effect::kWrites) plan.factor = stream;
  if (rule->effect == Effect::kNormalises) plan.factor = 1.0F / stream;

  const int64_t block = ggml_blck_size(plan.type);
  if (plan.shape[0] % block != 0) {
    return make_error(
        ErrorCode::kBadArgument, "{}: '{}' in {} needs rows in multiples of {} weights, not {} (the model's own: {})",
        axis_option(rule->row), source.name, ggml_type_name(plan.type), block, plan.shape[0], source.ne[0]);
  }
  return plan;
}

GgufContextPtr scaled_metadata(const gguf_context& source, const Catalog& catalog, const Sizes& from, const Sizes& to,
                               const ScaleOptions& options) {
  GgufContextPtr keys(gguf_init_empty());
  gguf_set_kv(keys.get(), &source);
  // The output is one file, padded as usual, and llama.cpp names its type by its tensors.
  for (const char* key : {"split.no", "split.count", "split.tensors.count", "general.alignment"}) {
    gguf_remove_key(keys.get(), key);
  }
  if (options.type) gguf_remove_key(keys.get(), "general.file_type");

  const std::string& arch = catalog.architecture;
  const auto set = [&](const char* key, int64_t value) {
    gguf_set_val_u32(keys.get(), fmt::format("{}.{}", arch, key).c_str(), static_cast<uint32_t>(value));
  };
  // Without these keys llama.cpp takes the width divided by the heads, which was right before.
  const int64_t heads_key = gguf_find_key(keys.get(), (arch + ".attention.head_count").c_str());
  if (heads_key >= 0 && gguf_get_kv_type(keys.get(), heads_key) == GGUF_TYPE_UINT32) {
    const int64_t head_dim = from.hidden / std::max(1U, gguf_get_val_u32(keys.get(), heads_key));
    for (const char* key : {"attention.key_length", "attention.value_length"}) {
      if (gguf_find_key(keys.get(), fmt::format("{}.{}", arch, key).c_str()) < 0) set(key, head_dim);
    }
  }
  set("embedding_length", to.hidden);
  set("expert_feed_forward_length", to.expert);
  if (to.shared != 0) set("expert_shared_feed_forward_length", to.shared);
  const std::string name = fmt::format("{} (padded to width {}, experts {})",
                                       catalog.name.empty() ? "model" : catalog.name, to.hidden, to.expert);
  gguf_set_val_str(keys.get(), "general.name", name.c_str());
  return keys;
}

}  // namespace

uint64_t ScalePlan::tensor_bytes() const {
  uint64_t sum = 0;
  for (const TensorPlan& tensor : tensors) sum += tensor.bytes();
  return sum;
}

Result<ScalePlan> plan_scaling(const Catalog& catalog, const ScaleOptions& options) {
  const std::string& path = catalog.files.front()->path();
  if (std::ranges::find(kArchitectures, catalog.architecture) == std::end(kArchitectures)) {
    return make_error(ErrorCode::kUnsupported, "'{}' is a {} model: padding is known to be exact for {} only", path,
                      printable(catalog.architecture), fmt::join(kArchitectures, " and "));
  }
  if (!catalog.is_moe()) return make_error(ErrorCode::kUnsupported, "'{}' has no routed experts", path);
  if (catalog.n_layer_nextn != 0) {
    return make_error(ErrorCode::kUnsupported, "'{}' has layers that predict further tokens: not supported", path);
  }
  if (options.type && ggml_quantize_requires_imatrix(*options.type)) {
    return make_error(ErrorCode::kBadArgument, "--type {} cannot be made without an importance matrix",
                      ggml_type_name(*options.type));
  }
  const Result<Sizes> from = source_sizes(catalog);
  if (!from) return from.error();
  const Result<Sizes> to = wanted_sizes(*from, options);
  if (!to) return to.error();
  Result<GgufHeader> header = read_gguf_header(*catalog.files.front());
  if (!header) return header.error();

  ScalePlan plan;
  plan.metadata = scaled_metadata(*header->context, catalog, *from, *to, options);
  for (const CatalogTensor& source : catalog.tensors) {
    Result<TensorPlan> tensor = plan_tensor(source, *from, *to, options);
    if (!tensor) return tensor.error();
    plan.tensors.push_back(std::move(*tensor));
  }
  for (const ExpertLayer& layer : catalog.expert_layers) {
    uint64_t record = 0;
    for (const TensorPlan& tensor : plan.tensors) {
      const auto name = parse_expert_tensor_name(tensor.source.name);
      if (name && name->layer == layer.layer) record += tensor.bytes() / static_cast<uint64_t>(tensor.slab_count);
    }
    plan.record_bytes = std::max(plan.record_bytes, record);
  }
  return plan;
}

}  // namespace sluice::scale_model
