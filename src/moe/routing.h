// What the router chose for one batch, turned around: for every distinct expert the rows that want it.
// A row is one (token, choice): row = token * top_k + choice. Experts stand in order of first appearance, the rows of
// an expert in rising order, which is the order ggml's MUL_MAT_ID takes them in.
//
// Errors   set: kBadArgument for an id outside [0, n_expert): ids are data, a NaN in the router can make them anything.
// Threads  thread-compatible. Cost O(rows + n_expert); no allocation in a steady state.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "ggml.h"

namespace sluice {

class Routing {
 public:
  // `ids` is an I32 tensor [top_k, n_token], any strides.
  Status set(const ggml_tensor* ids, uint32_t n_expert);

  std::span<const uint32_t> experts() const { return experts_; }
  std::span<const uint32_t> rows(uint32_t expert_index) const {
    return std::span(rows_).subspan(row_begin_[expert_index], row_begin_[expert_index + 1] - row_begin_[expert_index]);
  }
  uint32_t n_row() const { return static_cast<uint32_t>(rows_.size()); }
  uint32_t top_k() const { return top_k_; }
  // [n_token][top_k], as the router said them.
  std::span<const int32_t> ids() const { return ids_; }
  // The chosen expert of a row, as the router said it.
  int32_t id(uint32_t row) const { return ids_[row]; }

 private:
  uint32_t top_k_ = 0;
  std::vector<int32_t> ids_;          // [n_token][top_k]
  std::vector<uint32_t> experts_;
  std::vector<uint32_t> index_of_;    // expert -> position in experts_, or kNone
  std::vector<uint32_t> row_begin_;   // [experts + 1]
  std::vector<uint32_t> rows_;
};

}  // namespace sluice
