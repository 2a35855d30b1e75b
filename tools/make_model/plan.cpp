#include "make_model/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "make_model/random.h"

namespace sluice::make_model {
namespace {

// Root mean square of silu(a) and of silu(a) * b for independent standard normal a and b.
constexpr double kSiluRms = 0.6;
// What softmax averaging leaves of a value's deviation, for the attention peaks below and a few hundred tokens.
constexpr double kAttentionRms = 0.5;
// Deviation of q's and k's elements: scores then have a deviation of its square, so attention is peaked, not uniform.
constexpr double kQueryKeyDeviation = 1.5;
constexpr double kRouterLogitDeviation = 2.0;
constexpr double kOutputLogitDeviation = 2.5;
constexpr float kNormDeviation = 0.1F;
// DeepSeek-V3's factor on the routed experts' normalised weights.
constexpr float kDeepseekWeightsScale = 2.5F;
constexpr uint32_t kGatingSigmoid = 2;  // llama.cpp's number in expert_gating_func
constexpr uint32_t kSlidingWindow = 128;
constexpr uint32_t kConvKernel = 4;
constexpr uint32_t kFullAttentionInterval = 4;
constexpr int32_t kTokenTypeControl = 3;

class Planner {
 public:
  Planner(const ModelSpec& spec, const Tokenizer& tokenizer)
      : spec_(spec), tokenizer_(tokenizer), sublayer_(1.0 / std::sqrt(spec.n_layer)) {
    plan_.metadata.reset(gguf_init_empty());
  }

  ModelPlan build() && {
    set_common_keys();
    matrix("token_embd.weight", spec_.dense_type, {width(), vocab()}, 1.0);
    switch (spec_.arch) {
      case Arch::kQwen3Moe:
      case Arch::kLlama: set_rope_keys(); break;
      case Arch::kQwen3Next: set_qwen3next_keys(); break;
      case Arch::kDeepseek2: set_deepseek2_keys(); break;
      case Arch::kGptOss:
        set_rope_keys();
        set_u32("attention.sliding_window", kSlidingWindow);
        break;
    }
    for (layer_ = 0; layer_ < spec_.n_layer; ++layer_) add_layer();
    add_output();
    return std::move(plan_);
  }

 private:
  int64_t width() const { return spec_.width; }
  int64_t vocab() const { return tokenizer_.vocab_size(); }
  int64_t heads_width() const { return int64_t{spec_.n_head} * spec_.head_dim; }
  int64_t kv_width() const { return int64_t{spec_.n_head_kv} * spec_.head_dim; }

  // --- metadata -----------------------------------------------------------------------------------------------------

  std::string key(std::string_view name) const { return fmt::format("{}.{}", arch_name(spec_.arch), name); }
  void set_u32(std::string_view name, uint32_t value) {
    gguf_set_val_u32(plan_.metadata.get(), key(name).c_str(), value);
  }
  void set_f32(std::string_view name, float value) { gguf_set_val_f32(plan_.metadata.get(), key(name).c_str(), value); }
  void set_bool(std::string_view name, bool value) {
    gguf_set_val_bool(plan_.metadata.get(), key(name).c_str(), value);
  }

  void set_common_keys() {
    gguf_context* metadata = plan_.metadata.get();
    gguf_set_val_str(metadata, "general.architecture", arch_name(spec_.arch));
    gguf_set_val_str(metadata, "general.type", "model");
    gguf_set_val_str(
        metadata, "general.name",
        fmt::format("synthetic {} {}x{} seed {}", arch_name(spec_.arch), spec_.n_layer, spec_.n_expert, spec_.seed)
            .c_str());
    gguf_set_val_u32(metadata, "general.quantization_version", GGML_QNT_VERSION);
    set_u32("vocab_size", tokenizer_.vocab_size());
    set_u32("block_count", spec_.n_layer);
    set_u32("context_length", spec_.context);
    set_u32("embedding_length", spec_.width);
    // llama has no key of its own for the experts' inner width.
    set_u32("feed_forward_length", spec_.arch == Arch::kLlama ? spec_.ff : dense_ff());
    if (spec_.arch != Arch::kLlama) set_u32("expert_feed_forward_length", spec_.ff);
    set_u32("expert_count", spec_.n_expert);
    set_u32("expert_used_count", spec_.n_expert_used);
    set_u32("attention.head_count", spec_.n_head);
    set_u32("attention.head_count_kv", spec_.arch == Arch::kDeepseek2 ? 1 : spec_.n_head_kv);
    set_f32("attention.layer_norm_rms_epsilon", 1e-6F);
    set_f32("rope.freq_base", 10000.0F);
    gguf_set_kv(metadata, tokenizer_.keys.get());
  }

  void set_rope_keys() {
    set_u32("attention.key_length", spec_.head_dim);
    set_u32("attention.value_length", spec_.head_dim);
    set_u32("rope.dimension_count", spec_.head_dim);
  }

  void set_qwen3next_keys() {
    set_u32("attention.key_length", spec_.head_dim);
    set_u32("attention.value_length", spec_.head_dim);
    set_u32("rope.dimension_count", spec_.head_dim / 4);
    set_u32("expert_shared_feed_forward_length", shared_ff());
    set_u32("full_attention_interval", full_attention_interval());
    set_u32("ssm.conv_kernel", kConvKernel);
    set_u32("ssm.state_size", spec_.head_dim);
    set_u32("ssm.group_count", delta_key_heads());
    set_u32("ssm.time_step_rank", spec_.n_head);
    set_u32("ssm.inner_size", spec_.n_head * spec_.head_dim);
  }

  void set_deepseek2_keys() {
    set_u32("leading_dense_block_count", spec_.n_layer_dense);
    set_u32("attention.q_lora_rank", lora_rank());
    set_u32("attention.kv_lora_rank", lora_rank());
    // With absorbed projections attention runs on the latent vector: one head of latent plus rotary part.
    set_u32("attention.key_length", lora_rank() + rope_dim());
    set_u32("attention.value_length", lora_rank());
    set_u32("attention.key_length_mla", spec_.head_dim + rope_dim());
    set_u32("attention.value_length_mla", spec_.head_dim);
    set_u32("rope.dimension_count", rope_dim());
    set_u32("expert_shared_count", spec_.n_expert_shared);
    set_f32("expert_weights_scale", kDeepseekWeightsScale);
    set_bool("expert_weights_norm", true);
    set_u32("expert_gating_func", kGatingSigmoid);
    if (spec_.n_group > 1) {
      set_u32("expert_group_count", spec_.n_group);
      set_u32("expert_group_used_count", spec_.n_group_used);
    }
  }

  uint32_t dense_ff() const { return spec_.ff * std::max(2U, spec_.n_expert_used); }
  uint32_t shared_ff() const { return spec_.ff * spec_.n_expert_shared; }
  // As wide as a quarter of the stream, but never less than a head.
  uint32_t lora_rank() const { return std::max(spec_.head_dim, static_cast<uint32_t>(align_to(spec_.width / 4, 32))); }
  uint32_t rope_dim() const { return spec_.head_dim / 2; }
  uint32_t delta_key_heads() const { return spec_.n_head % 2 == 0 ? spec_.n_head / 2 : spec_.n_head; }
  // A model too short for the usual rhythm still gets one full attention layer, its last.
  uint32_t full_attention_interval() const { return std::min(kFullAttentionInterval, spec_.n_layer); }
  // llama.cpp takes a deepseek2 of these depths for a lite model, which has plain queries.
  bool has_plain_queries() const { return spec_.n_layer == 26 || spec_.n_layer == 27; }

  static uint64_t align_to(uint64_t value, uint64_t align) { return (value + align - 1) / align * align; }

  // --- tensors ------------------------------------------------------------------------------------------------------

  std::string block(std::string_view name) const { return fmt::format("blk.{}.{}", layer_, name); }

  TensorPlan& add(std::string name, ggml_type type, std::vector<int64_t> shape, Distribution distribution) {
    plan_.tensors.push_back({std::move(name), type, std::move(shape), std::move(distribution), false});
    return plan_.tensors.back();
  }

  // A matrix of `type`, or of the nearest simpler one whose blocks fit the row.
  TensorPlan& matrix(std::string name, ggml_type type, std::vector<int64_t> shape, double deviation) {
    if (shape[0] % ggml_blck_size(type) != 0) type = shape[0] % 32 == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    return add(std::move(name), type, std::move(shape), {0.0F, static_cast<float>(deviation), {}, {}});
  }
  TensorPlan& dense(std::string_view name, std::vector<int64_t> shape, double gain) {
    const double deviation = gain / std::sqrt(static_cast<double>(shape[0]));
    return matrix(block(name), spec_.dense_type, std::move(shape), deviation);
  }
  void norm(std::string name, int64_t elements, float mean = 1.0F) {
    add(std::move(name), GGML_TYPE_F32, {elements}, {mean, kNormDeviation, {}, {}});
  }
  void vector(std::string_view name, int64_t elements, float mean, float deviation) {
    add(block(name), GGML_TYPE_F32, {elements}, {mean, deviation, {}, {}});
  }
  void expert_matrix(std::string_view name, ggml_type type, int64_t row, int64_t rows, double gain) {
    const auto deviation = static_cast<float>(gain / std::sqrt(static_cast<double>(row)));
    add(block(name), type, {row, rows, spec_.n_expert}, {0.0F, deviation, {}, {}}).of_experts = true;
  }

  void add_layer() {
    norm(block("attn_norm.weight"), width());
    switch (spec_.arch) {
      case Arch::kDeepseek2: add_latent_attention(); break;
      case Arch::kQwen3Next:
        if ((layer_ + 1) % full_attention_interval() == 0) {
          add_attention();
        } else {
          add_delta_net();
        }
        break;
      default: add_attention(); break;
    }
    const bool post_named = spec_.arch == Arch::kQwen3Next || spec_.arch == Arch::kGptOss;
    norm(block(post_named ? "post_attention_norm.weight" : "ffn_norm.weight"), width());
    if (layer_ < spec_.n_layer_dense) {
      add_glu("", dense_ff(), sublayer_);
    } else {
      add_router();
      add_experts();
      if (spec_.n_expert_shared > 0) add_shared_expert();
    }
  }

  void add_attention() {
    const bool has_qk_norm = spec_.arch == Arch::kQwen3Moe || spec_.arch == Arch::kQwen3Next;
    const bool has_gate = spec_.arch == Arch::kQwen3Next;  // the output gate shares attn_q with the query
    const double qk_gain = has_qk_norm ? 1.0 : kQueryKeyDeviation;
    dense("attn_q.weight", {width(), heads_width() * (has_gate ? 2 : 1)}, qk_gain);
    dense("attn_k.weight", {width(), kv_width()}, qk_gain);
    dense("attn_v.weight", {width(), kv_width()}, 1.0);
    const double gate_rms = has_gate ? 0.5 : 1.0;
    dense("attn_output.weight", {heads_width(), width()}, sublayer_ / (kAttentionRms * gate_rms));
    if (has_qk_norm) {
      norm(block("attn_q_norm.weight"), spec_.head_dim, static_cast<float>(kQueryKeyDeviation));
      norm(block("attn_k_norm.weight"), spec_.head_dim, static_cast<float>(kQueryKeyDeviation));
    }
    if (spec_.arch == Arch::kGptOss) {
      vector("attn_output.bias", width(), 0.0F, static_cast<float>(0.1 * sublayer_));
      vector("attn_sinks.weight", spec_.n_head, 0.0F, 1.0F);
    }
  }

  void add_delta_net() {
    const int64_t key_width = int64_t{delta_key_heads()} * spec_.head_dim;
    const int64_t value_width = heads_width();
    dense("attn_qkv.weight", {width(), 2 * key_width + value_width}, 1.0);
    dense("attn_gate.weight", {width(), value_width}, 1.0);
    dense("ssm_ba.weight", {width(), 2 * int64_t{spec_.n_head}}, 1.0);
    add(block("ssm_conv1d.weight"), GGML_TYPE_F32, {kConvKernel, 2 * key_width + value_width}, {0.0F, 0.5F, {}, {}});
    // The state decays by exp(a * softplus(alpha + dt)) a token: half-lives from a few tokens to a few hundred.
    Random random(spec_.seed, block("ssm_a"));
    std::vector<float> a(spec_.n_head);
    std::vector<float> dt(spec_.n_head);
    for (uint32_t head = 0; head < spec_.n_head; ++head) {
      a[head] = -(1.0F + 15.0F * random.uniform());
      dt[head] = -6.5F + 4.0F * random.uniform();
    }
    add(block("ssm_a"), GGML_TYPE_F32, {spec_.n_head}, {0.0F, 0.0F, {}, std::move(a)});
    add(block("ssm_dt.bias"), GGML_TYPE_F32, {spec_.n_head}, {0.0F, 0.0F, {}, std::move(dt)});
    norm(block("ssm_norm.weight"), spec_.head_dim);
    dense("ssm_out.weight", {value_width, width()}, sublayer_ / kSiluRms);
  }

  void add_latent_attention() {
    const int64_t rank = lora_rank();
    const int64_t head_k = spec_.head_dim + rope_dim();
    if (has_plain_queries()) {
      dense("attn_q.weight", {width(), spec_.n_head * head_k}, kQueryKeyDeviation);
    } else {
      dense("attn_q_a.weight", {width(), rank}, 1.0);
      norm(block("attn_q_a_norm.weight"), rank);
      dense("attn_q_b.weight", {rank, spec_.n_head * head_k}, kQueryKeyDeviation);
    }
    dense("attn_kv_a_mqa.weight", {width(), rank + rope_dim()}, kQueryKeyDeviation);
    norm(block("attn_kv_a_norm.weight"), rank);
    // Stored transposed: its rows are summed over the head, yet a key's elements are sums over the latent vector.
    matrix(block("attn_k_b.weight"), spec_.dense_type, {spec_.head_dim, rank, spec_.n_head},
           kQueryKeyDeviation / std::sqrt(static_cast<double>(rank)));
    dense("attn_v_b.weight", {rank, spec_.head_dim, spec_.n_head}, 1.0);
    dense("attn_output.weight", {heads_width(), width()}, sublayer_ / kAttentionRms);
  }

  void add_router() {
    // A long row has scores further from zero in both directions, so its expert is among the best more often.
    std::vector<float> factors;
    if (spec_.router_skew > 0.0F) {
      Random random(spec_.seed, block("router skew"));
      for (uint32_t expert = 0; expert < spec_.n_expert; ++expert) {
        factors.push_back(std::exp(spec_.router_skew * random.normal()));
      }
    }
    const auto deviation = static_cast<float>(kRouterLogitDeviation / std::sqrt(static_cast<double>(width())));
    add(block("ffn_gate_inp.weight"), GGML_TYPE_F32, {width(), spec_.n_expert},
        {0.0F, deviation, std::move(factors), {}});
    if (spec_.arch == Arch::kGptOss) vector("ffn_gate_inp.bias", spec_.n_expert, 0.0F, 0.1F);
    if (spec_.arch == Arch::kDeepseek2) vector("exp_probs_b.bias", spec_.n_expert, 0.0F, 0.02F);
  }

  void add_experts() {
    const ggml_type type = spec_.gate_type(layer_);
    if (spec_.gate_up_fused) {
      expert_matrix("ffn_gate_up_exps.weight", type, width(), 2 * int64_t{spec_.ff}, 1.0);
    } else {
      expert_matrix("ffn_gate_exps.weight", type, width(), spec_.ff, 1.0);
      expert_matrix("ffn_up_exps.weight", type, width(), spec_.ff, 1.0);
    }
    // The weighted sum of k independent experts is smaller than one of them by about the root of k.
    const double weights_sum = spec_.arch == Arch::kDeepseek2 ? kDeepseekWeightsScale : 1.0;
    const double gain = sublayer_ * std::sqrt(spec_.n_expert_used) / (kSiluRms * weights_sum);
    expert_matrix("ffn_down_exps.weight", spec_.down_type_of(layer_), spec_.ff, width(), gain);

    if (spec_.arch == Arch::kGptOss) {
      const auto down_deviation = static_cast<float>(0.1 * gain);
      add(block("ffn_gate_exps.bias"), GGML_TYPE_F32, {spec_.ff, spec_.n_expert}, {0.0F, 0.2F, {}, {}});
      add(block("ffn_up_exps.bias"), GGML_TYPE_F32, {spec_.ff, spec_.n_expert}, {0.0F, 0.2F, {}, {}});
      add(block("ffn_down_exps.bias"), GGML_TYPE_F32, {width(), spec_.n_expert}, {0.0F, down_deviation, {}, {}});
    }
    if (spec_.expert_scales) {
      // llama.cpp has no scale for the fused tensor.
      if (!spec_.gate_up_fused) {
        vector("ffn_gate_exps.scale", spec_.n_expert, 1.0F, 0.1F);
        vector("ffn_up_exps.scale", spec_.n_expert, 1.0F, 0.1F);
      }
      vector("ffn_down_exps.scale", spec_.n_expert, 1.0F, 0.1F);
    }
  }

  void add_shared_expert() {
    const bool has_gate = spec_.arch == Arch::kQwen3Next;
    if (has_gate) {
      vector("ffn_gate_inp_shexp.weight", width(), 0.0F, static_cast<float>(1.0 / std::sqrt(spec_.width)));
    }
    add_glu("_shexp", shared_ff(), sublayer_);
  }

  void add_glu(std::string_view suffix, int64_t inner, double gain) {
    dense(fmt::format("ffn_gate{}.weight", suffix), {width(), inner}, 1.0);
    dense(fmt::format("ffn_up{}.weight", suffix), {width(), inner}, 1.0);
    dense(fmt::format("ffn_down{}.weight", suffix), {inner, width()}, gain / kSiluRms);
  }

  void add_output() {
    norm("output_norm.weight", width());
    // Control tokens never win, so that greedy text goes on for as long as it is asked to.
    std::vector<float> factors(tokenizer_.is_control.size());
    std::ranges::transform(tokenizer_.is_control, factors.begin(),
                           [](bool is_control) { return is_control ? 0.0F : 1.0F; });
    matrix("output.weight", spec_.dense_type, {width(), vocab()}, kOutputLogitDeviation / std::sqrt(spec_.width))
        .distribution.row_factors = std::move(factors);
  }

  const ModelSpec& spec_;
  const Tokenizer& tokenizer_;
  const double sublayer_;  // deviation that one sublayer adds to the residual stream
  uint32_t layer_ = 0;
  ModelPlan plan_;
};

}  // namespace

int64_t TensorPlan::row_count() const {
  int64_t rows = 1;
  for (size_t i = 1; i < shape.size(); ++i) rows *= shape[i];
  return rows;
}

uint64_t ModelPlan::tensor_bytes() const {
  uint64_t total = 0;
  for (const TensorPlan& tensor : tensors) total += tensor.bytes();
  return total;
}

Result<Tokenizer> read_tokenizer(const std::string& path) {
  // ggml would print its own lines before ours.
  ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  Tokenizer tokenizer;
  tokenizer.keys.reset(gguf_init_from_file(path.c_str(), {true, nullptr}));
  gguf_context* keys = tokenizer.keys.get();
  if (keys == nullptr) {
    return make_error(ErrorCode::kNotFound, "no GGUF model to take the tokenizer from in '{}'", path);
  }
  std::vector<std::string> foreign;
  for (int64_t i = 0; i < gguf_get_n_kv(keys); ++i) {
    const std::string_view name = gguf_get_key(keys, i);
    if (!name.starts_with("tokenizer.")) foreign.emplace_back(name);
  }
  for (const std::string& name : foreign) gguf_remove_key(keys, name.c_str());

  const int64_t tokens = gguf_find_key(keys, "tokenizer.ggml.tokens");
  const int64_t types = gguf_find_key(keys, "tokenizer.ggml.token_type");
  if (tokens < 0 || gguf_get_kv_type(keys, tokens) != GGUF_TYPE_ARRAY || gguf_get_arr_n(keys, tokens) == 0) {
    return make_error(ErrorCode::kBadFile, "no token list in '{}'", path);
  }
  tokenizer.is_control.assign(gguf_get_arr_n(keys, tokens), false);
  if (types >= 0 && gguf_get_kv_type(keys, types) == GGUF_TYPE_ARRAY &&
      gguf_get_arr_type(keys, types) == GGUF_TYPE_INT32 && gguf_get_arr_n(keys, types) == tokenizer.is_control.size()) {
    const auto* data = static_cast<const int32_t*>(gguf_get_arr_data(keys, types));
    for (size_t i = 0; i < tokenizer.is_control.size(); ++i) tokenizer.is_control[i] = data[i] == kTokenTypeControl;
  }
  return tokenizer;
}

ModelPlan plan_model(const ModelSpec& spec, const Tokenizer& tokenizer) {
  return Planner(spec, tokenizer).build();
}

}  // namespace sluice::make_model
