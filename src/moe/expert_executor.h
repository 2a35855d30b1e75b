// Computes MoE blocks over experts that somebody else brings, a group at a time: the seam between the pool and the
// machine that multiplies. Two implementations: moe/fused_executor.h (ggml's CPU dot products over compact rows, in one
// graph) and moe/generic_executor.h (operations of any ggml backend). moe/block_executor.h chooses for each block.
//
// Slabs    ReadyExpert::slab are addresses in the pool's memory. Only an executor may look behind them: nothing above
//          this seam does, so a pool in another memory needs another executor and no other change.
// Graph    the block's tensors (ids, input, outside nodes, down, sum) are ordinary memory, whoever computes.
// Order    begin_block, then compute for disjoint groups until every expert of the routing was there. The results do
//          not depend on the grouping: each row of `down` lies at its (token, choice) place, and where the block has a
//          `sum`, that is taken with the last expert, in the router's order.
// Copies   everything that a later group reads is copied by begin_block: ggml's allocator may have put the result of
//          `down` over tensors that are dead after their last use in node order, while a later group still needs them.
// Lifetime block and routing outlive the last compute; slabs are valid during their compute.
// Errors   kCancelled when the abort callback said so, kNoMemory, kUnsupported.
// Threads  one computation at a time; ggml's threads inside.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "loader/loader.h"
#include "moe/moe_block.h"
#include "moe/routing.h"

namespace sluice {

// Totals since construction.
struct ExecutorCounters {
  uint64_t fused_blocks = 0;
  uint64_t generic_blocks = 0;
  uint64_t lone_blocks = 0;  // single products of blocks that a graph did not hold whole, either way
  int64_t scatter_ns = 0;    // copies to the rows' (token, choice) places, and the weighted sum; part of compute's time

  ExecutorCounters& operator+=(const ExecutorCounters& other) {
    fused_blocks += other.fused_blocks;
    generic_blocks += other.generic_blocks;
    lone_blocks += other.lone_blocks;
    scatter_ns += other.scatter_ns;
    return *this;
  }
  ExecutorCounters operator-(const ExecutorCounters& other) const {
    return {fused_blocks - other.fused_blocks, generic_blocks - other.generic_blocks, lone_blocks - other.lone_blocks,
            scatter_ns - other.scatter_ns};
  }
};

class ExpertExecutor {
 public:
  virtual ~ExpertExecutor() = default;

  virtual void set_threads(int n_threads) = 0;
  virtual void set_threadpool(ggml_threadpool_t threadpool) = 0;
  virtual void set_abort_callback(ggml_abort_callback callback, void* data) = 0;

  // Nodes that need no expert, in order.
  virtual Status compute_nodes(std::span<ggml_tensor* const> nodes) = 0;

  virtual Status begin_block(const MoeBlock& block, const Routing& routing) = 0;
  virtual Status compute(std::span<const ReadyExpert> experts) = 0;

  virtual ExecutorCounters counters() const = 0;
};

}  // namespace sluice
