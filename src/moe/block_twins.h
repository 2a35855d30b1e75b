// The middle of a MoE block said again for some of its rows: copies of what it takes from outside, and a twin of each
// of its operations on compact tensors [ne0, 1, P] of any P rows. Shared by all executors; where twins live and who
// computes them is the executor's (TwinGraph).
//
// Lifetime copies lie in the arena that copy was given, until it is reset.
// Cost     no allocation once the vectors have grown.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ggml.h"
#include "moe/arena.h"
#include "moe/expert_executor.h"
#include "moe/moe_block.h"
#include "moe/routing.h"

namespace sluice {

// The outside operands of a block's middle, copied as whole tensors with their rows side by side.
class BlockOperands {
 public:
  // Also computes the block's outside nodes, in order, through `executor`. What they may overwrite for their part (the
  // block's input) must have been copied before.
  Status copy(const MoeBlock& block, Arena& arena, ExpertExecutor& executor);
  const float* find(const ggml_tensor* operand) const;

 private:
  void copy_one(const ggml_tensor* source, Arena& arena);

  std::vector<std::pair<const ggml_tensor*, const float*>> operands_;
};

// A graph that twins are added to.
class TwinGraph {
 public:
  explicit TwinGraph(ggml_context* ctx) : ctx_(ctx) {}
  TwinGraph(const TwinGraph&) = delete;
  virtual ~TwinGraph() = default;

  // A tensor for results.
  virtual ggml_tensor* new_result(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) = 0;
  // A tensor with these contents, which stay where they are until the graph was computed.
  virtual ggml_tensor* new_operand(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void* contents) = 0;
  // A small weight of the model, such as a bias, in a form that this graph's operations can read.
  virtual ggml_tensor* side_weight(ggml_tensor* weight) = 0;
  virtual void add(ggml_tensor* node) = 0;

  ggml_context* ctx() const { return ctx_; }
  void set_twin(const ggml_tensor* original, ggml_tensor* twin) { twins_.emplace_back(original, twin); }
  ggml_tensor* twin(const ggml_tensor* original) const;
  void clear_twins() { twins_.clear(); }

 private:
  ggml_context* ctx_;
  std::vector<std::pair<const ggml_tensor*, ggml_tensor*>> twins_;
};

// Adds twins of the middle operations for these rows; those of the first matrices' products are there. Returns the
// input of down. Gathered operands lie in `arena`, until the graph was computed.
ggml_tensor* build_middle(const MoeBlock& block, const Routing& routing, const BlockOperands& operands,
                          std::span<const uint32_t> rows, Arena& arena, TwinGraph& graph);

}  // namespace sluice
