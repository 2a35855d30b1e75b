// One row of weights made longer, of another type, or multiplied by a power of two. Knows no files and no names.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace sluice::scale_model {

// Multiplies the weights of whole blocks by a power of two without touching their quants: the blocks' own scales are
// multiplied. False for a type whose scales are not known here.
bool scale_blocks(ggml_type type, std::span<std::byte> blocks, float factor);

// Bytes that are all zero stand for weights that are all zero in every type but some that are asked for here.
bool zero_bytes_are_zero_weights(ggml_type type);

class RowPadder {
 public:
  RowPadder(ggml_type from, int64_t from_elements, ggml_type to, int64_t to_elements, float factor);

  // `row` and `out` are one row before and after. When the type stays, the quants are copied as they are.
  // kUnsupported when the type's scales are not known or the factor does not fit them, which is checked for every row.
  Status pad(std::span<const std::byte> row, std::span<std::byte> out);

 private:
  void to_floats(ggml_type type, const std::byte* row, std::vector<float>& values) const;

  const ggml_type from_;
  const ggml_type to_;
  const int64_t from_elements_;
  const float factor_;
  std::vector<float> before_;  // [to_elements], zeros behind the row's own
  std::vector<float> after_;
};

}  // namespace sluice::scale_model
