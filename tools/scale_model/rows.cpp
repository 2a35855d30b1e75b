#include "scale_model/rows.h"

#include <algorithm>
#include <cstring>

namespace sluice::scale_model {
namespace {

// Where a block's 16-bit scale stands, and that of its minimum where it has one (ggml's block structures).
struct ScaleFields {
  ggml_type type;
  size_t scale_offset;
  int min_offset = -1;
};
constexpr ScaleFields kScaleFields[] = {
    {GGML_TYPE_F16, 0},     {GGML_TYPE_Q4_0, 0},    {GGML_TYPE_Q4_1, 0, 2},   {GGML_TYPE_Q5_0, 0},
    {GGML_TYPE_Q5_1, 0, 2}, {GGML_TYPE_Q8_0, 0},    {GGML_TYPE_Q2_K, 80, 82}, {GGML_TYPE_Q3_K, 108},
    {GGML_TYPE_Q4_K, 0, 2}, {GGML_TYPE_Q5_K, 0, 2}, {GGML_TYPE_Q6_K, 208},    {GGML_TYPE_IQ4_NL, 0},
    {GGML_TYPE_IQ4_XS, 0},  {GGML_TYPE_IQ3_S, 0},   {GGML_TYPE_IQ3_XXS, 0},   {GGML_TYPE_IQ2_S, 0},
};

void scale_half(std::byte* field, float factor) {
  ggml_fp16_t half = 0;
  std::memcpy(&half, field, sizeof(half));
  half = ggml_fp32_to_fp16(ggml_fp16_to_fp32(half) * factor);
  std::memcpy(field, &half, sizeof(half));
}

}  // namespace

bool scale_blocks(ggml_type type, std::span<std::byte> blocks, float factor) {
  if (type == GGML_TYPE_F32) {
    for (size_t at = 0; at < blocks.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, &blocks[at], sizeof(value));
      value *= factor;
      std::memcpy(&blocks[at], &value, sizeof(value));
    }
    return true;
  }
  if (type == GGML_TYPE_BF16) {
    for (size_t at = 0; at < blocks.size(); at += sizeof(ggml_bf16_t)) {
      ggml_bf16_t value{};
      std::memcpy(&value, &blocks[at], sizeof(value));
      value = ggml_fp32_to_bf16(ggml_bf16_to_fp32(value) * factor);
      std::memcpy(&blocks[at], &value, sizeof(value));
    }
    return true;
  }
  const ScaleFields* fields = std::ranges::find(kScaleFields, type, &ScaleFields::type);
  if (fields == std::end(kScaleFields)) return false;
  const size_t block_bytes = ggml_type_size(type);
  for (size_t at = 0; at < blocks.size(); at += block_bytes) {
    scale_half(&blocks[at + fields->scale_offset], factor);
    if (fields->min_offset >= 0) scale_half(&blocks[at + static_cast<size_t>(fields->min_offset)], factor);
  }
  return true;
}

bool zero_bytes_are_zero_weights(ggml_type type) {
  if (type == GGML_TYPE_F32) return true;
  const auto to_float = ggml_get_type_traits(type)->to_float;
  if (to_float == nullptr) return false;
  const std::vector<std::byte> block(ggml_type_size(type));
  std::vector<float> values(static_cast<size_t>(ggml_blck_size(type)), 1.0F);
  to_float(block.data(), values.data(), ggml_blck_size(type));
  return std::ranges::all_of(values, [](float value) { return value == 0.0F; });
}

RowPadder::RowPadder(ggml_type from, int64_t from_elements, ggml_type to, int64_t to_elements, float factor)
    : from_(from),
      to_(to),
      from_elements_(from_elements),
      factor_(factor),
      before_(static_cast<size_t>(to_elements)),
      after_(static_cast<size_t>(to_elements)) {}

void RowPadder::to_floats(ggml_type type, const std::byte* row, std::vector<float>& values) const {
  if (type == GGML_TYPE_F32) {
    std::memcpy(values.data(), row, static_cast<size_t>(from_elements_) * sizeof(float));
  } else {
    ggml_get_type_traits(type)->to_float(row, values.data(), from_elements_);
  }
}

Status RowPadder::pad(std::span<const std::byte> row, std::span<std::byte> out) {
  if (from_ != to_) {
    to_floats(from_, row.data(), before_);
    for (float& value : std::span(before_).first(static_cast<size_t>(from_elements_))) value *= factor_;
    ggml_quantize_chunk(to_, before_.data(), out.data(), 0, 1, static_cast<int64_t>(before_.size()), nullptr);
    return {};
  }
  std::ranges::copy(row, out.begin());
  std::ranges::fill(out.subspan(row.size()), std::byte{0});
  if (factor_ == 1.0F) return {};
  if (!scale_blocks(to_, out.first(row.size()), factor_)) {
    return make_error(ErrorCode::kUnsupported, "{} weights cannot be multiplied in place: give another --type",
                      ggml_type_name(to_));
  }
  to_floats(from_, row.data(), before_);
  to_floats(to_, out.data(), after_);
  for (int64_t i = 0; i < from_elements_; ++i) {
    if (after_[i] != before_[i] * factor_) {
      return make_error(ErrorCode::kUnsupported, "a weight of {} times {} is {} in {}", before_[i], factor_, after_[i],
                        ggml_type_name(to_));
    }
  }
  return {};
}

}  // namespace sluice::scale_model
