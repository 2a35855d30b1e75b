#include "moe/block_executor.h"

#include "base/log.h"

namespace sluice {

Result<FusedMode> parse_fused_mode(const std::string& text) {
  if (text == "auto") return FusedMode::kAuto;
  if (text == "off") return FusedMode::kOff;
  if (text == "require") return FusedMode::kRequire;
  return make_error(ErrorCode::kBadArgument, "fused computation: wanted auto, off or require, given '{}'", text);
}

Result<std::unique_ptr<BlockExecutor>> BlockExecutor::create() {
  auto fused = FusedExecutor::create();
  if (!fused) return fused.error();
  auto generic = GenericExecutor::create();
  if (!generic) return generic.error();
  std::unique_ptr<BlockExecutor> executor(new BlockExecutor);
  executor->fused_ = std::move(*fused);
  executor->generic_ = std::move(*generic);
  return executor;
}

void BlockExecutor::set_threads(int n_threads) {
  fused_->set_threads(n_threads);
  generic_->set_threads(n_threads);
}

void BlockExecutor::set_threadpool(ggml_threadpool_t threadpool) {
  fused_->set_threadpool(threadpool);
  generic_->set_threadpool(threadpool);
}

void BlockExecutor::set_abort_callback(ggml_abort_callback callback, void* data) {
  fused_->set_abort_callback(callback, data);
  generic_->set_abort_callback(callback, data);
}

Status BlockExecutor::begin_block(const MoeBlock& block, const Routing& routing) {
  chosen_ = generic_.get();
  if (mode_ == FusedMode::kOff) return chosen_->begin_block(block, routing);
  const bool lone = block.first.empty();
  std::string reason = FusedExecutor::refusal(block);
  if (reason.empty()) chosen_ = fused_.get();
  if (lone && reason.empty()) reason = block.lone_reason;
  if (!reason.empty()) {
    if (mode_ == FusedMode::kRequire) {
      return make_error(ErrorCode::kUnsupported,
                        "layer {}: fused computation is required, but this block is not taken: {}", block.weight->layer,
                        reason);
    }
    log_warning_once("blocks of experts are computed {}: {}",
                     lone ? "matrix by matrix" : "by ggml's separate operations", reason);
  }
  return chosen_->begin_block(block, routing);
}

ExecutorCounters BlockExecutor::counters() const {
  ExecutorCounters sum = fused_->counters();
  sum += generic_->counters();
  return sum;
}

}  // namespace sluice
