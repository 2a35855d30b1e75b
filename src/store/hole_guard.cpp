#include "store/hole_guard.h"

#include <algorithm>

namespace sluice {

namespace {

// A block of 4-bit floats: its scales, then pairs of codes.
struct Float4Format {
  size_t n_scale;
  std::byte scale_max;
  // In gate and up: their product must overflow, and their sums must not, for infinities of both signs add up to a NaN
  // that the next matrix's conversion may take for zero.
  std::byte scale_large;
};
constexpr Float4Format kMxfp4{1, std::byte{0xff}, std::byte{198}};
constexpr Float4Format kNvfp4{4, std::byte{0x7e}, std::byte{0x7e}};
constexpr std::byte kCodesPlus6{0x77};
constexpr std::byte kCodesMinus6{0xff};

const Float4Format* float4_format(ggml_type type) {
  if (type == GGML_TYPE_MXFP4) return &kMxfp4;
  return type == GGML_TYPE_NVFP4 ? &kNvfp4 : nullptr;
}

}  // namespace

std::vector<GuardPatch> hole_guard(MatrixRole role, const ExpertTensorShape& shape) {
  const size_t block_bytes = ggml_type_size(shape.type);
  const Float4Format* format = float4_format(shape.type);
  if (format == nullptr) {
    if (role != MatrixRole::kDown) return {};
    return {{.offset = 0, .bytes = std::vector<std::byte>(block_bytes, std::byte{0xff})}};
  }
  const auto first_block_of_row = [&](int64_t row, std::byte scale, std::byte codes) {
    GuardPatch patch{.offset = static_cast<uint64_t>(row) * ggml_row_size(shape.type, shape.n_in),
                     .bytes = std::vector<std::byte>(block_bytes, codes)};
    std::fill_n(patch.bytes.begin(), format->n_scale, scale);
    return patch;
  };
  if (role == MatrixRole::kDown) return {first_block_of_row(0, format->scale_max, kCodesPlus6)};
  std::vector<GuardPatch> patches;
  // A fused tensor has gate's rows first, then up's.
  const int64_t n_ff = role == MatrixRole::kGateUp ? shape.n_out / 2 : shape.n_out;
  for (int64_t half = 0; half < shape.n_out; half += n_ff) {
    patches.push_back(first_block_of_row(half, format->scale_large, kCodesPlus6));
    if (n_ff > 1) patches.push_back(first_block_of_row(half + 1, format->scale_large, kCodesMinus6));
  }
  return patches;
}

}  // namespace sluice
