// The routed experts of one loaded model, as the backend sees them: tensors come in one by one while llama.cpp loads,
// their sources are settled, then a loader is made, and MoE blocks are computed until the model is freed.
//
// States   collecting -> (finish) -> ready | failed.
// Sources  a tensor's bytes come from a catalog (our own program; a pack in any), from a file range that was found
//          (plugin), or, when no file is certain, they are kept in memory and counted against the budget.
// Owns     its tensors' descriptions (ggml_tensor::extra points at them), the loader.
// Errors   finish: kNoMemory for a budget below the minimum. compute_block: whatever the loader or executor said.
// Threads  thread-safe: a lock is held while tensors are added, while finishing, and for each block.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/engine.h"
#include "backend/source_finder.h"
#include "loader/loader.h"
#include "loader/prefetcher.h"
#include "moe/block_executor.h"
#include "moe/moe_block.h"
#include "moe/native_layout.h"
#include "moe/routing.h"
#include "predict/lens_set.h"
#include "predict/recall_probe.h"
#include "store/expert_tensor.h"
#include "trace/routing_trace.h"

namespace sluice {

class StreamedModel;

enum class SourceKind { kUnknown, kFile, kMemory };

// One routed-expert tensor of the model; ExpertWeight is its first base so that ggml_tensor::extra can be read as one.
struct StreamedTensor : ExpertWeight {
  std::string name;
  ExpertTensorShape shape;
  SourceKind source = SourceKind::kUnknown;
  const ExpertLayer* catalog_layer = nullptr;  // where the bytes are, when a catalog says so
  const ExpertMatrix* catalog_matrix = nullptr;
  std::shared_ptr<const File> file;  // else a range of a file that was found
  uint64_t offset = 0;
  const std::byte* mapped = nullptr;  // where the tool has mapped the bytes, if it has
  uint64_t received_bytes = 0;        // from the front, compared with the file or kept
  bool trusted = false;               // the source was given, not found: arriving bytes are not compared
};

class StreamedModel {
 public:
  StreamedModel(const EngineOptions& options, std::shared_ptr<const Catalog> catalog);
  ~StreamedModel();
  StreamedModel(const StreamedModel&) = delete;

  // True when a tensor of this name may still be added: not finished, and not there yet.
  bool accepts(ExpertTensorName name) const;
  // Describes a tensor that was allocated in one of our buffers. `mapped`: its data lies in a file mapping.
  StreamedTensor* add_tensor(const ggml_tensor* tensor, ExpertTensorName name, bool mapped);
  // Bytes of a tensor arrive. `memory` is where the buffer would keep them.
  void receive(StreamedTensor& tensor, const ggml_tensor* ggml, const void* data, uint64_t offset, uint64_t bytes,
               std::byte* memory);
  // Bytes of a tensor are asked for, by whoever cannot compute on ours.
  Status read(const StreamedTensor& tensor, const std::byte* memory, uint64_t offset, void* data, uint64_t bytes) const;

  // Settles the budget and makes the loader, once. False while a tensor's source is not known yet.
  bool can_finish() const;
  Status finish();

  // One block whose weight belongs to this model.
  Status compute_block(const MoeBlock& block, Routing& routing, BlockExecutor& executor);

  // Predictions: whether the rows that leave `layer` are of use, and those rows, [n_row][n_embd].
  bool wants_output(uint32_t layer, size_t n_row) const;
  void see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd);

  EngineStats stats() const;

 private:
  enum class State { kCollecting, kReady, kFailed };

  Status finish_locked();
  Status open_trace(const std::vector<LayerSource>& sources, uint32_t top_k);
  Result<uint64_t> resolve_budget(const SlotPlan& plan, uint64_t dense_bytes) const;
  Result<uint64_t> fitted_budget(uint64_t budget, const SlotPlan& plan, uint64_t dense_bytes) const;
  void make_lenses(const Catalog& catalog);
  void see_block(uint32_t layer, const MoeBlock& block, const Routing& routing);
  void keep_in_memory(StreamedTensor& tensor, std::byte* memory);
  void drop_mapped_pages();
  void describe_from_catalog(StreamedTensor& tensor) const;
  void adopt_pack(const File& file);
  Status use_native_layout();
  void count_choices(uint32_t layer, const Routing& routing, uint32_t n_expert);
  const StreamedTensor* find(uint32_t layer, MatrixRole role) const;
  std::string model_path() const;

  mutable std::mutex mutex_;
  EngineOptions options_;
  std::shared_ptr<const Catalog> catalog_;
  bool adopted_ = false;              // the catalog was found behind a stock tool's file, not given
  const File* looked_at_ = nullptr;   // the last file that was asked whether it is a pack's
  SourceFinder finder_;
  State state_ = State::kCollecting;
  Status failure_;
  std::map<std::pair<uint32_t, MatrixRole>, std::unique_ptr<StreamedTensor>> tensors_;
  std::unique_ptr<NativeLayout> native_;  // for a pack of that layout
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<RoutingTraceWriter> trace_;
  uint32_t trace_top_k_ = 0;
  std::shared_ptr<const LensSet> lenses_;  // null: nothing is predicted
  std::unique_ptr<RecallProbe> probe_;
  std::unique_ptr<Prefetcher> prefetcher_;  // after loader_, which it uses
  uint64_t kept_bytes_ = 0;
  std::vector<ReadyExpert> ready_;
  std::vector<std::vector<uint64_t>> choices_;  // as in EngineStats
  int64_t route_sync_ns_ = 0;
  int64_t compute_ns_ = 0;
  ExecutorCounters executed_;
};

}  // namespace sluice
