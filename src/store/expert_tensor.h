// What a routed-expert tensor is called and how its bytes are laid out: the words that the catalog (files), the
// backend (tensors that llama.cpp hands over) and the computation share. Opens and reads nothing.
//
// Layout   a routed-expert tensor has ggml shape [n_in, n_out, n_expert]: expert e's matrix, its slab, is
//          slab_bytes consecutive bytes at e * slab_bytes from the tensor's start.
// Names    blk.LAYER.ffn_{gate,up,down,gate_up}_exps.weight, as llama.cpp writes them. Per-expert bias and scale
//          tensors (same prefix, .bias, .scale or .input_scale) are side tensors: small, resident, never streamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string>
#include <string_view>

#include "ggml.h"

namespace sluice {

enum class MatrixRole : uint8_t { kGate, kUp, kGateUp, kDown };
inline constexpr int kMatrixRoles = 4;
const char* matrix_role_name(MatrixRole role);  // "gate", "up", "gate_up", "down"

struct ExpertTensorName {
  uint32_t layer = 0;
  MatrixRole role = MatrixRole::kGate;
};

std::string expert_tensor_name(ExpertTensorName name);
// Empty unless `name` is exactly a routed-expert weight's name.
std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name);
// True for the per-expert side tensors: blk.N.ffn_*_exps.{bias,scale,input_scale}.
bool is_expert_side_tensor_name(std::string_view name);

struct ExpertTensorShape {
  ggml_type type = GGML_TYPE_COUNT;
  int64_t n_in = 0;
  int64_t n_out = 0;
  int64_t n_expert = 0;
  uint64_t slab_bytes = 0;  // ggml_row_size(type, n_in) * n_out

  uint64_t total_bytes() const { return slab_bytes * static_cast<uint64_t>(n_expert); }
  bool operator==(const ExpertTensorShape&) const = default;
};

}  // namespace sluice
