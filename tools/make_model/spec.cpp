#include "make_model/spec.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace sluice::make_model {
namespace {

struct NamedArch {
  Arch arch;
  const char* name;
};
constexpr std::array kArchs = {NamedArch{Arch::kQwen3Moe, "qwen3moe"}, NamedArch{Arch::kQwen3Next, "qwen3next"},
                               NamedArch{Arch::kDeepseek2, "deepseek2"}, NamedArch{Arch::kGptOss, "gpt-oss"},
                               NamedArch{Arch::kLlama, "llama"}};

// Limits that llama.cpp asserts while loading.
constexpr uint32_t kLayersMax = 512;
constexpr uint32_t kExpertsMax = 1024;

Status check_range(const char* option, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return {};
  if (min == max) return make_error(ErrorCode::kBadArgument, "{} must be {} here, not {}", option, min, value);
  return make_error(ErrorCode::kBadArgument, "{} must be {} to {}, not {}", option, min, max, value);
}

Status check_rows(const char* type_option, ggml_type type, const char* width_option, uint32_t row_elements) {
  const int64_t block = ggml_blck_size(type);
  if (row_elements % block == 0) return {};
  return make_error(ErrorCode::kBadArgument, "{} {} has blocks of {} weights, so {} must be a multiple of that, not {}",
                    type_option, ggml_type_name(type), block, width_option, row_elements);
}

Status check_counts(const ModelSpec& spec) {
  const bool is_deepseek2 = spec.arch == Arch::kDeepseek2;
  const bool has_shared = is_deepseek2 || spec.arch == Arch::kQwen3Next;
  const std::array checks = {
      check_range("--layers", spec.n_layer, 1, kLayersMax),
      check_range("--width", spec.width, 32, 1U << 20),
      check_range("--ff", spec.ff, 32, 1U << 20),
      check_range("--experts", spec.n_expert, 2, kExpertsMax),
      check_range("--experts-used", spec.n_expert_used, 1, spec.n_expert),
      check_range("--heads", spec.n_head, 1, 1024),
      check_range("--kv-heads", spec.n_head_kv, 1, spec.n_head),
      check_range("--head-dim", spec.head_dim, 32, 1024),
      check_range("--context", spec.context, 1, 1U << 24),
      check_range("--dense-layers", spec.n_layer_dense, 0, is_deepseek2 ? spec.n_layer - 1 : 0),
      // Both architectures demand the shared expert's tensors; the others have no place for them.
      check_range("--shared-experts", spec.n_expert_shared, has_shared ? 1 : 0, has_shared ? 64 : 0),
      check_range("--groups", spec.n_group, 1, is_deepseek2 ? spec.n_expert / 2 : 1),
      check_range("--groups-used", spec.n_group_used, 1, spec.n_group == 1 ? 1 : spec.n_group - 1),
  };
  for (const Status& check : checks) {
    if (!check.ok()) return check;
  }
  return {};
}

}  // namespace

const char* arch_name(Arch arch) {
  return std::ranges::find(kArchs, arch, &NamedArch::arch)->name;
}

Result<Arch> parse_arch(std::string_view name) {
  std::string known;
  for (const NamedArch& entry : kArchs) {
    if (name == entry.name) return entry.arch;
    known += known.empty() ? "" : ", ";
    known += entry.name;
  }
  return make_error(ErrorCode::kBadArgument, "--arch must be one of {}, not '{}'", known, name);
}

Status check_spec(const ModelSpec& spec) {
  SLUICE_ASSERT(!spec.expert_types.empty(), "a spec without expert types");
  if (Status counts = check_counts(spec); !counts.ok()) return counts;

  if (spec.n_head % spec.n_head_kv != 0) {
    return make_error(ErrorCode::kBadArgument, "--heads must be a multiple of --kv-heads: {} is none of {}",
                      spec.n_head, spec.n_head_kv);
  }
  if (spec.width % 32 != 0 || spec.head_dim % 32 != 0) {
    return make_error(ErrorCode::kBadArgument, "--width and --head-dim must be multiples of 32, not {} and {}",
                      spec.width, spec.head_dim);
  }
  if (spec.n_expert % spec.n_group != 0) {
    return make_error(ErrorCode::kBadArgument, "--experts must be a multiple of --groups: {} is none of {}",
                      spec.n_expert, spec.n_group);
  }
  if (spec.n_expert_used > spec.n_expert / spec.n_group * spec.n_group_used) {
    return make_error(ErrorCode::kBadArgument, "--experts-used {} is more than the {} experts of {} groups",
                      spec.n_expert_used, spec.n_expert / spec.n_group * spec.n_group_used, spec.n_group_used);
  }
  if (spec.arch == Arch::kQwen3Next && spec.n_layer < 2) {
    return make_error(ErrorCode::kBadArgument,
                      "--layers of qwen3next must be 2 or more: one full attention layer is needed");
  }
  if (spec.gate_up_fused && spec.arch != Arch::kQwen3Next && spec.arch != Arch::kDeepseek2) {
    return make_error(ErrorCode::kBadArgument, "--fused-gate-up: llama.cpp knows no fused tensor in {}",
                      arch_name(spec.arch));
  }
  if (!std::isfinite(spec.router_skew) || spec.router_skew < 0.0F || spec.router_skew > 4.0F) {
    return make_error(ErrorCode::kBadArgument, "--router-skew must be 0 to 4, not {}", spec.router_skew);
  }
  for (uint32_t layer = 0; layer < spec.n_layer; ++layer) {
    if (Status rows = check_rows("expert type", spec.gate_type(layer), "--width", spec.width); !rows.ok()) return rows;
    if (Status rows = check_rows("down type", spec.down_type_of(layer), "--ff", spec.ff); !rows.ok()) return rows;
  }
  return {};
}

}  // namespace sluice::make_model
