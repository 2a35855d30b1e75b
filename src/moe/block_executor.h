// Chooses, for each block, which executor computes it, and says why when it is not the fused one.
//
// auto     fused where the block is one of its list; anything else by the generic executor, and a line once per reason.
//          A lone product (a graph that does not hold the block whole) is fused as far as it goes, with a line as well.
// off      generic everywhere.
// require  as auto, but what is not a whole fused block is kUnsupported.
// Threads  as the executors.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/result.h"
#include "moe/expert_executor.h"
#include "moe/fused_executor.h"
#include "moe/generic_executor.h"

namespace sluice {

enum class FusedMode { kAuto, kOff, kRequire };
Result<FusedMode> parse_fused_mode(const std::string& text);  // "auto", "off", "require"

class BlockExecutor final : public ExpertExecutor {
 public:
  static Result<std::unique_ptr<BlockExecutor>> create();

  // For the blocks that begin from now on.
  void set_mode(FusedMode mode) { mode_ = mode; }

  void set_threads(int n_threads) override;
  void set_threadpool(ggml_threadpool_t threadpool) override;
  void set_abort_callback(ggml_abort_callback callback, void* data) override;
  Status compute_nodes(std::span<ggml_tensor* const> nodes) override { return fused_->compute_nodes(nodes); }
  Status begin_block(const MoeBlock& block, const Routing& routing) override;
  Status compute(std::span<const ReadyExpert> experts) override { return chosen_->compute(experts); }
  ExecutorCounters counters() const override;

 private:
  BlockExecutor() = default;

  std::unique_ptr<FusedExecutor> fused_;
  std::unique_ptr<GenericExecutor> generic_;
  ExpertExecutor* chosen_ = nullptr;  // for the block that has begun
  FusedMode mode_ = FusedMode::kAuto;
};

}  // namespace sluice
