#include "store/expert_tensor.h"

#include <array>
#include <charconv>

#include <fmt/format.h>

namespace sluice {

namespace {

constexpr std::array<MatrixRole, kMatrixRoles> kRoles = {MatrixRole::kGate, MatrixRole::kUp, MatrixRole::kGateUp,
                                                         MatrixRole::kDown};

// Parses "blk.LAYER.ffn_ROLE_exps" + suffix.
std::optional<ExpertTensorName> parse_name_with_suffix(std::string_view name, std::string_view suffix) {
  constexpr std::string_view kPrefix = "blk.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  uint32_t layer = 0;
  const auto [end, code] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (code != std::errc{}) return std::nullopt;
  name.remove_prefix(static_cast<size_t>(end - name.data()));
  for (const MatrixRole role : kRoles) {
    if (name == fmt::format(".ffn_{}_exps{}", matrix_role_name(role), suffix)) return ExpertTensorName{layer, role};
  }
  return std::nullopt;
}

}  // namespace

const char* matrix_role_name(MatrixRole role) {
  switch (role) {
    case MatrixRole::kGate: return "gate";
    case MatrixRole::kUp: return "up";
    case MatrixRole::kGateUp: return "gate_up";
    case MatrixRole::kDown: return "down";
  }
  return "unknown";
}

std::string expert_tensor_name(ExpertTensorName name) {
  return fmt::format("blk.{}.ffn_{}_exps.weight", name.layer, matrix_role_name(name.role));
}

std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name) {
  return parse_name_with_suffix(name, ".weight");
}

bool is_expert_side_tensor_name(std::string_view name) {
  return parse_name_with_suffix(name, ".bias") || parse_name_with_suffix(name, ".scale") ||
         parse_name_with_suffix(name, ".input_scale");
}

}  // namespace sluice
