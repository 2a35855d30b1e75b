// The expert computation on the CPU, straight from the slots: the fast executor.
//
// How      All operations run as nodes of small ggml graphs on ggml's own CPU backend and threads:
//          - the block's input rows are converted once to the type that the weights' dot product wants;
//          - experts with few rows: one node computes all their gate and up rows with ggml's vec_dot, one all their
//            down rows; each matrix of an expert with kDelegateRowsMin rows or more goes to ggml's MUL_MAT_ID, alone,
//            because ggml has other kernels for such batches (tiled, per expert, from 8 rows on); so does each matrix
//            in a native layout (moe/native_layout.h), whatever its rows;
//          - what lies between is ggml's own operations on the compact rows (moe/block_twins.h);
//          - the weighted sum of a token's rows, in the router's order, when the last expert was there.
//          When all experts are there at once, as in most decode steps, the whole block is one graph.
// Exact    every row passes through the same kernels, with the same operands, as in ggml's MUL_MAT_ID over the whole
//          tensor, and lands at its (token, choice) place. So results do not depend on grouping, order, pool size or
//          threads, and equal stock llama.cpp bit for bit: without repacked weights for plain slabs, with them for
//          native ones.
// Takes    what `refusal` finds nothing wrong with: types with a public dot product and a conversion to its input type,
//          and the operations that its tests compare. Slabs are read where they are: they must be ordinary memory.
// Cost     no allocation in a steady state; two clock reads for each scatter and sum.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "moe/arena.h"
#include "moe/block_twins.h"
#include "moe/expert_executor.h"

namespace sluice {

class FusedExecutor final : public ExpertExecutor {
 public:
  // From this many rows on, ggml's MUL_MAT_ID computes an expert (ggml_tiled_min_batch in ggml-cpu/tiled/tiled.cpp).
  static constexpr uint32_t kDelegateRowsMin = 8;

  static Result<std::unique_ptr<FusedExecutor>> create();
  ~FusedExecutor() override;

  // Why this block is none for it: "type q8_K has no public dot product"; empty when it is one.
  static std::string refusal(const MoeBlock& block);

  void set_threads(int n_threads) override { ggml_backend_cpu_set_n_threads(backend_, n_threads); }
  void set_threadpool(ggml_threadpool_t threadpool) override { ggml_backend_cpu_set_threadpool(backend_, threadpool); }
  void set_abort_callback(ggml_abort_callback callback, void* data) override {
    ggml_backend_cpu_set_abort_callback(backend_, callback, data);
  }
  Status compute_nodes(std::span<ggml_tensor* const> nodes) override;
  Status begin_block(const MoeBlock& block, const Routing& routing) override;
  Status compute(std::span<const ReadyExpert> experts) override;
  ExecutorCounters counters() const override { return counters_; }

  uint64_t scratch_bytes() const { return block_arena_.bytes() + group_arena_.bytes(); }

 private:
  struct Converted {  // the block's input rows in the type that vec_dot wants
    ggml_type type = GGML_TYPE_COUNT;
    std::byte* data = nullptr;
    uint64_t row_bytes = 0;
  };
  struct GroupExpert {  // an expert's place among the compact rows of a group
    const ReadyExpert* expert = nullptr;
    size_t first_row = 0;
    size_t n_row = 0;
  };
  struct Group;  // the graph that is being built

  FusedExecutor() = default;
  Status run_graph(ggml_cgraph* graph);
  const Converted& converted_input(ggml_type type) const;
  Status compute_group(std::span<const ReadyExpert> experts);
  void add_conversions(Group& group);
  void add_sum(Group& group);

  ggml_backend_t backend_ = nullptr;
  const MoeBlock* block_ = nullptr;
  const Routing* routing_ = nullptr;
  size_t n_expert_left_ = 0;  // of the routing, not yet computed
  bool converted_ = false;    // the block's input rows
  float* weights_ = nullptr;  // [n_token][top_k], copied; null: all rows count the same
  std::vector<Converted> inputs_;
  BlockOperands operands_;
  std::vector<GroupExpert> few_;   // of the current group: fewer than kDelegateRowsMin rows
  std::vector<GroupExpert> many_;
  std::vector<uint32_t> rows_;
  std::vector<uint8_t> graph_memory_;
  ExecutorCounters counters_;
  Arena block_arena_;  // lives for a block
  Arena group_arena_;  // lives for a group
};

}  // namespace sluice
