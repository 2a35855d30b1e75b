// The expert computation on the CPU, straight from the slots: one block, a group of experts at a time, in any order.
//
// How      All operations run as nodes of small ggml graphs on ggml's own CPU backend and threads:
//          - the block's input rows are converted once to the type that the weights' dot product wants;
//          - experts with few rows: one node computes all their gate and up rows with ggml's vec_dot, one all their
//            down rows; each matrix of an expert with kDelegateRowsMin rows or more goes to ggml's MUL_MAT_ID, alone,
//            because ggml has other kernels for such batches (tiled, per expert, from 8 rows on); so does each matrix
//            in a native layout (moe/native_layout.h), whatever its rows;
//          - what lies between is ggml's own operations on the compact rows (moe/moe_block.h);
//          - the weighted sum of a token's rows, in the router's order, when the last expert was there.
//          When all experts are there at once, as in most decode steps, the whole block is one graph.
// Exact    every row passes through the same kernels, with the same operands, as in ggml's MUL_MAT_ID over the whole
//          tensor, and lands at its (token, choice) place. So results do not depend on grouping, order, pool size or
//          threads, and equal stock llama.cpp bit for bit: without repacked weights for plain slabs, with them for
//          native ones.
// Copies   the block's input and outside operands are copied before anything is written: ggml's allocator may have put
//          the result of `down` over tensors that are dead after their last use in node order, while a later group
//          still needs them.
// Errors   kCancelled when the abort callback said so, kNoMemory, kUnsupported.
// Threads  one computation at a time; ggml's threads inside.
// Cost     no allocation in a steady state.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "loader/loader.h"
#include "moe/arena.h"
#include "moe/moe_block.h"
#include "moe/routing.h"

namespace sluice {

class CpuExecutor {
 public:
  // From this many rows on, ggml's MUL_MAT_ID computes an expert (ggml_tiled_min_batch in ggml-cpu/tiled/tiled.cpp).
  static constexpr uint32_t kDelegateRowsMin = 8;

  static Result<std::unique_ptr<CpuExecutor>> create();
  ~CpuExecutor();
  CpuExecutor(const CpuExecutor&) = delete;

  void set_threads(int n_threads) { ggml_backend_cpu_set_n_threads(backend_, n_threads); }
  void set_threadpool(ggml_threadpool_t threadpool) { ggml_backend_cpu_set_threadpool(backend_, threadpool); }
  void set_abort_callback(ggml_abort_callback callback, void* data) {
    ggml_backend_cpu_set_abort_callback(backend_, callback, data);
  }

  // Nodes that need no expert, in order.
  Status compute_nodes(std::span<ggml_tensor* const> nodes);

  // One block: begin, then compute for disjoint groups until every expert of the routing was there. The block and the
  // routing must outlive the last compute.
  Status begin_block(const MoeBlock& block, const Routing& routing);
  Status compute(std::span<const ReadyExpert> experts);

  uint64_t scratch_bytes() const { return block_arena_.bytes() + group_arena_.bytes(); }

 private:
  struct Converted {  // the block's input rows in the type that vec_dot wants
    ggml_type type = GGML_TYPE_COUNT;
    std::byte* data = nullptr;
    uint64_t row_bytes = 0;
  };
  struct Operand {  // an outside operand of a middle operation, copied
    const ggml_tensor* tensor = nullptr;
    float* data = nullptr;
  };
  struct GroupExpert {  // an expert's place among the compact rows of a group
    const ReadyExpert* expert = nullptr;
    size_t first_row = 0;
    size_t n_row = 0;
  };
  struct Group;  // the graph that is being built

  CpuExecutor() = default;
  Status run_graph(ggml_cgraph* graph);
  const Converted& converted_input(ggml_type type) const;
  Status compute_group(std::span<const ReadyExpert> experts);
  void add_conversions(Group& group);
  void add_sum(Group& group);
  const ggml_tensor* build_middle(Group& group, std::span<const uint32_t> rows);
  ggml_tensor* middle_operand(Group& group, const ggml_tensor* node, int source, std::span<const uint32_t> rows);

  ggml_backend_t backend_ = nullptr;
  const MoeBlock* block_ = nullptr;
  const Routing* routing_ = nullptr;
  size_t n_expert_left_ = 0;  // of the routing, not yet computed
  bool converted_ = false;    // the block's input rows
  float* weights_ = nullptr;  // [n_token][top_k], copied; null: all rows count the same
  std::vector<Converted> inputs_;
  std::vector<Operand> operands_;
  std::vector<GroupExpert> few_;   // of the current group: fewer than kDelegateRowsMin rows
  std::vector<GroupExpert> many_;
  std::vector<uint32_t> rows_;
  std::vector<uint8_t> graph_memory_;
  Arena block_arena_;  // lives for a block
  Arena group_arena_;  // lives for a group
};

}  // namespace sluice
