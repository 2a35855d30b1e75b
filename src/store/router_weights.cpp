#include "store/router_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "ggml.h"
#include "store/gguf_header.h"

namespace sluice {

namespace {

// Read as sigmoid by llama.cpp when the file does not say it.
constexpr std::array<std::string_view, 3> kSigmoidArchitectures = {"glm4moe", "bailingmoe2", "llama4"};

const CatalogTensor* find_tensor(const Catalog& catalog, const std::string& name) {
  const auto it = std::find_if(catalog.tensors.begin(), catalog.tensors.end(),
                               [&](const CatalogTensor& tensor) { return tensor.name == name; });
  return it == catalog.tensors.end() ? nullptr : &*it;
}

// The values of a tensor with `count` elements of any type that ggml can turn into floats.
Result<std::vector<float>> read_floats(const Catalog& catalog, const CatalogTensor& tensor, uint64_t count) {
  uint64_t elements = 1;
  for (const int64_t ne : tensor.ne) elements *= static_cast<uint64_t>(ne);
  if (elements != count) {
    return make_error(ErrorCode::kUnsupported, "{}: {} elements, wanted {}", tensor.name, elements, count);
  }
  std::vector<std::byte> bytes(tensor.range.bytes);
  const File& file = *catalog.files[tensor.range.file];
  if (Status status = file.read_exactly(tensor.range.offset, bytes.data(), bytes.size()); !status)
    return status.error();
  std::vector<float> values(count);
  if (tensor.type == GGML_TYPE_F32) {
    std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<std::byte*>(values.data()));
    return values;
  }
  const auto to_float = ggml_get_type_traits(tensor.type)->to_float;
  if (to_float == nullptr) {
    return make_error(ErrorCode::kUnsupported, "{}: type {}", tensor.name, ggml_type_name(tensor.type));
  }
  to_float(bytes.data(), values.data(), static_cast<int64_t>(count));
  return values;
}

// Leaves `values` empty where there is no such tensor.
Status read_if_there(const Catalog& catalog, const std::string& name, uint64_t count, std::vector<float>& values) {
  const CatalogTensor* tensor = find_tensor(catalog, name);
  if (tensor == nullptr) return {};
  auto read = read_floats(catalog, *tensor, count);
  if (!read) return read.error();
  values = std::move(*read);
  return {};
}

std::optional<float> find_float(const gguf_context& context, const std::string& key) {
  const int64_t index = gguf_find_key(&context, key.c_str());
  if (index < 0 || gguf_get_kv_type(&context, index) != GGUF_TYPE_FLOAT32) return std::nullopt;
  return gguf_get_val_f32(&context, index);
}

Result<RouterScore> score_of(const std::optional<uint64_t>& stated, const RouterWeights& weights,
                             const std::string& architecture) {
  if (!stated || *stated == 0) {
    const bool sigmoid = !weights.selection_bias.empty() ||
                         std::find(kSigmoidArchitectures.begin(), kSigmoidArchitectures.end(), architecture) !=
                             kSigmoidArchitectures.end();
    return sigmoid ? RouterScore::kSigmoid : RouterScore::kSoftmax;
  }
  switch (*stated) {
    case 1: return RouterScore::kSoftmax;
    case 2: return RouterScore::kSigmoid;
    case 3: return RouterScore::kSoftmaxOfTopK;
    case 4: return RouterScore::kSqrtSoftplus;
    default: return make_error(ErrorCode::kUnsupported, "expert_gating_func {} is not known", *stated);
  }
}

// What the metadata says of all layers' routers.
Status read_settings(const Catalog& catalog, RouterWeights& weights) {
  const File& file = *catalog.files.front();
  const auto header = read_gguf_header(file);
  if (!header) return header.error();
  const gguf_context& context = *header->context;
  const std::string prefix = catalog.architecture + ".";
  uint64_t groups[2] = {};
  const char* const keys[2] = {"expert_group_count", "expert_group_used_count"};
  for (int i = 0; i < 2; ++i) {
    const auto value = find_unsigned(context, prefix + keys[i], file.path());
    if (!value) return value.error();
    groups[i] = value->value_or(0);
  }
  weights.n_group = static_cast<uint32_t>(groups[0]);
  weights.n_group_used = static_cast<uint32_t>(groups[1]);
  const auto rms = find_float(context, prefix + "attention.layer_norm_rms_epsilon");
  const auto layer_norm = find_float(context, prefix + "attention.layer_norm_epsilon");
  weights.layer_norm = !rms && layer_norm;
  weights.epsilon = rms ? *rms : layer_norm.value_or(1e-6f);
  const auto gating = find_unsigned(context, prefix + "expert_gating_func", file.path());
  if (!gating) return gating.error();
  const auto score = score_of(*gating, weights, catalog.architecture);
  if (!score) return score.error();
  weights.score = *score;
  return {};
}

}  // namespace

Result<RouterWeights> read_router_weights(const Catalog& catalog, uint32_t layer) {
  const std::string prefix = fmt::format("blk.{}.", layer);
  const CatalogTensor* matrix = find_tensor(catalog, prefix + "ffn_gate_inp.weight");
  if (matrix == nullptr) return make_error(ErrorCode::kNotFound, "{}ffn_gate_inp.weight: no such tensor", prefix);
  std::string norm = prefix + "ffn_norm";
  if (find_tensor(catalog, norm + ".weight") == nullptr) norm = prefix + "post_attention_norm";
  const CatalogTensor* norm_weight = find_tensor(catalog, norm + ".weight");
  if (norm_weight == nullptr) return make_error(ErrorCode::kNotFound, "{}ffn_norm.weight: no such tensor", prefix);

  RouterWeights weights{.layer = layer,
                        .n_embd = static_cast<uint32_t>(matrix->ne[0]),
                        .n_expert = static_cast<uint32_t>(matrix->ne[1]),
                        .top_k = catalog.n_expert_used};
  const auto experts = std::find_if(catalog.expert_layers.begin(), catalog.expert_layers.end(),
                                    [&](const ExpertLayer& known) { return known.layer == layer; });
  if (experts == catalog.expert_layers.end() || experts->n_expert != weights.n_expert) {
    return make_error(ErrorCode::kUnsupported, "{}: {} rows, the layer has other experts", matrix->name,
                      weights.n_expert);
  }
  auto values = read_floats(catalog, *matrix, uint64_t{weights.n_embd} * weights.n_expert);
  if (!values) return values.error();
  weights.matrix = std::move(*values);
  auto norm_values = read_floats(catalog, *norm_weight, weights.n_embd);
  if (!norm_values) return norm_values.error();
  weights.norm_weight = std::move(*norm_values);
  if (Status status = read_if_there(catalog, norm + ".bias", weights.n_embd, weights.norm_bias); !status) {
    return status.error();
  }
  if (Status status = read_if_there(catalog, prefix + "ffn_gate_inp.bias", weights.n_expert, weights.bias); !status) {
    return status.error();
  }
  if (Status status = read_if_there(catalog, prefix + "exp_probs_b.bias", weights.n_expert, weights.selection_bias);
      !status) {
    return status.error();
  }
  if (Status status = read_settings(catalog, weights); !status) return status.error();
  const bool groups_fit =
      weights.n_group <= 1 ||
      (weights.n_expert % weights.n_group == 0 && weights.n_group_used >= 1 && weights.n_group_used <= weights.n_group);
  if (!groups_fit) {
    return make_error(ErrorCode::kUnsupported, "{} of {} groups of {} experts", weights.n_group_used, weights.n_group,
                      weights.n_expert);
  }
  return weights;
}

}  // namespace sluice
