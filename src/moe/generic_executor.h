// The expert computation by any ggml backend: the slow, obvious executor, for what the fused one does not take and to
// compare it with. Only graph operations and the backend interface are used.
//
// How      for each expert of a group: its input rows, MUL_MAT_ID with its one matrix for gate and up, the middle's
//          operations as twins (moe/block_twins.h), MUL_MAT_ID for down. One graph per group, placed by ggml's graph
//          allocator in the backend's own buffers; rows go in by ggml_backend_tensor_set and come back by tensor_get.
//          Outside nodes and the weighted sum are the graph's own nodes, computed on the CPU where their memory is.
// Slabs    a matrix is a tensor in a buffer that wraps the slot, where the backend's buffers are ordinary memory and it
//          can wrap some; else it is uploaded for its group.
// Exact    on the CPU backend, bit for bit as stock llama.cpp. Another backend's kernels round in their own way, but
//          grouping and order still change nothing.
// Errors   kUnsupported for an operation that the backend does not have, and for native slabs on any but the CPU.
// Cost     allocates: a graph's buffers when they grow, a small object for each wrapped matrix.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "moe/arena.h"
#include "moe/block_twins.h"
#include "moe/expert_executor.h"

namespace sluice {

class GenericExecutor final : public ExpertExecutor {
 public:
  // On a CPU backend of its own, or on `backend`, which the caller owns and which must outlive this.
  static Result<std::unique_ptr<GenericExecutor>> create(ggml_backend_t backend = nullptr);

  void set_threads(int n_threads) override { ggml_backend_cpu_set_n_threads(cpu_.get(), n_threads); }
  void set_threadpool(ggml_threadpool_t threadpool) override {
    ggml_backend_cpu_set_threadpool(cpu_.get(), threadpool);
  }
  void set_abort_callback(ggml_abort_callback callback, void* data) override {
    ggml_backend_cpu_set_abort_callback(cpu_.get(), callback, data);
  }
  Status compute_nodes(std::span<ggml_tensor* const> nodes) override;
  Status begin_block(const MoeBlock& block, const Routing& routing) override;
  Status compute(std::span<const ReadyExpert> experts) override;
  ExecutorCounters counters() const override { return counters_; }

  uint64_t uploaded_bytes() const { return uploaded_bytes_; }  // of matrices

 private:
  struct Contents {  // of a tensor, to be set once it has its place
    ggml_tensor* tensor = nullptr;
    const void* data = nullptr;
  };
  struct Group;  // the graph that is being built

  GenericExecutor() = default;
  Status compute_group(std::span<const ReadyExpert> experts);
  Status add_expert(Group& group, const ReadyExpert& expert);
  Result<ggml_tensor*> matrix(Group& group, const ggml_tensor* weight, const ExpertWeight& description,
                              const std::byte* slab);
  Status run(ggml_backend_t backend, ggml_cgraph* graph) const;

  ggml_backend_ptr cpu_;
  ggml_backend_t backend_ = nullptr;  // cpu_, or the caller's
  bool wraps_ = false;                // the backend computes on ordinary memory, through buffers that wrap it
  ggml_gallocr_ptr allocator_;
  const MoeBlock* block_ = nullptr;
  const Routing* routing_ = nullptr;
  size_t n_expert_left_ = 0;      // of the routing, not yet computed
  const float* input_ = nullptr;  // the block's input rows, copied side by side
  BlockOperands operands_;
  std::vector<Contents> contents_;
  std::vector<ggml_tensor*> results_;  // rows of down, by expert of the group
  std::vector<ggml_backend_buffer_ptr> wrapped_;
  std::vector<float> rows_;
  std::vector<uint8_t> graph_memory_;
  ExecutorCounters counters_;
  uint64_t uploaded_bytes_ = 0;
  Arena block_arena_;  // lives for a block
  Arena group_arena_;  // lives for a group
};

}  // namespace sluice
