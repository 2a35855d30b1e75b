#include "backend/streamed_model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "backend/registry.h"
#include "base/clock.h"
#include "base/log.h"
#include "io/system_memory.h"
#include "loader/drives.h"

namespace sluice {

namespace {

// Experts a token is taken to use when nothing says how many: only the smallest budget depends on it.
constexpr uint32_t kTopKUnknown = 8;
// With an automatic budget the plugin leaves this share of what is available to KV cache, computation and the system.
constexpr double kPluginShare = 0.80;
// A budget that was asked for leaves at least this free.
constexpr uint64_t kFitReserveBytesMin = 16 * kMiB;
constexpr uint64_t kFitReserveDivisor = 32;

}  // namespace

StreamedModel::StreamedModel(const EngineOptions& options, std::shared_ptr<const Catalog> catalog)
    : options_(options), catalog_(std::move(catalog)), finder_(options.direct) {}

// The plugin writes its figures when the process ends, after the tool has freed its model.
StreamedModel::~StreamedModel() {
  if (trace_) {
    if (Status status = trace_->close(); !status) log_error("trace: {}", status.error().message());
  }
  if (state_ == State::kReady) Registry::instance().retire(stats());
}

bool StreamedModel::accepts(ExpertTensorName name) const {
  std::lock_guard lock(mutex_);
  // One that has failed takes the rest of its tensors too: they are no other model's.
  return state_ != State::kReady && !tensors_.contains({name.layer, name.role});
}

StreamedTensor* StreamedModel::add_tensor(const ggml_tensor* tensor, ExpertTensorName name, bool mapped) {
  std::lock_guard lock(mutex_);
  auto description = std::make_unique<StreamedTensor>();
  description->layer = name.layer;
  description->role = name.role;
  description->owner = this;
  description->name = tensor->name;
  description->shape = {tensor->type, tensor->ne[0], tensor->ne[1], tensor->ne[2], tensor->nb[2]};
  if (mapped) {
    if (const auto found = finder_.find_mapping(tensor->data)) {
      description->source = SourceKind::kFile;
      description->file = found->file;
      description->offset = found->offset;
      description->trusted = true;
      description->mapped = static_cast<const std::byte*>(tensor->data);
      adopt_pack(*found->file);
    } else if (!catalog_) {
      // Mapped from something that is no file we can open: the mapping itself is the memory.
      description->source = SourceKind::kMemory;
      description->resident = static_cast<const std::byte*>(tensor->data);
    }
  }
  if (catalog_) describe_from_catalog(*description);
  return (tensors_[{name.layer, name.role}] = std::move(description)).get();
}

// Where the catalog says that a tensor's bytes are; nowhere, if it knows no such tensor.
void StreamedModel::describe_from_catalog(StreamedTensor& tensor) const {
  tensor.source = SourceKind::kUnknown;
  for (const ExpertLayer& layer : catalog_->expert_layers) {
    if (layer.layer != tensor.layer) continue;
    for (const ExpertMatrix& matrix : layer.matrices) {
      if (matrix.role != tensor.role || !(matrix.shape == tensor.shape)) continue;
      tensor.source = SourceKind::kFile;
      tensor.catalog_layer = &layer;
      tensor.catalog_matrix = &matrix;
      tensor.trusted = true;
    }
  }
}

// A stock tool that loads a pack's model.gguf maps or reads holes: the pack's catalog says where the experts are. A pack
// that cannot be opened fails the model, for there are no other bytes; whoever makes a context is told why.
void StreamedModel::adopt_pack(const File& file) {
  if (catalog_ || &file == looked_at_ || state_ == State::kFailed) return;
  looked_at_ = &file;
  const auto is_pack = is_pack_model(file);
  if (!is_pack || !*is_pack) return;
  auto catalog = Catalog::open(file.path(), options_.direct);
  if (!catalog) {
    failure_ = catalog.error();
    state_ = State::kFailed;
    return;
  }
  catalog_ = std::make_shared<const Catalog>(std::move(*catalog));
  adopted_ = true;
  log_info("{} is a pack of layout {}", file.path(), pack_layout_name(catalog_->pack->layout));
}

void StreamedModel::receive(StreamedTensor& tensor, const ggml_tensor* ggml, const void* data, uint64_t offset, uint64_t bytes,
                            std::byte* memory) {
  std::lock_guard lock(mutex_);
  if (tensor.trusted) return;  // the file has them
  if (tensor.source == SourceKind::kUnknown) {
    if (const auto found = finder_.find_tensor(ggml)) {
      tensor.source = SourceKind::kFile;
      tensor.file = found->file;
      tensor.offset = found->offset;
      adopt_pack(*found->file);
      if (catalog_) describe_from_catalog(tensor);
      if (tensor.trusted || state_ == State::kFailed) return;
    } else {
      keep_in_memory(tensor, memory);
    }
  }
  if (tensor.source == SourceKind::kFile) {
    // Certain only if the bytes are the same. What arrived before was, so it can be read back if this is not.
    std::vector<std::byte> in_file(bytes);
    if (tensor.file->read_exactly(tensor.offset + offset, in_file.data(), bytes).ok() &&
        std::memcmp(in_file.data(), data, bytes) == 0) {
      tensor.received_bytes += bytes;
      return;
    }
    log_warning("{}: the bytes that the program set are not those of {}", tensor.name, tensor.file->path());
    keep_in_memory(tensor, memory);
  }
  if (!failure_.ok()) return;
  std::memcpy(memory + offset, data, bytes);
}

void StreamedModel::keep_in_memory(StreamedTensor& tensor, std::byte* memory) {
  const std::shared_ptr<const File> before = tensor.source == SourceKind::kFile ? tensor.file : nullptr;
  tensor.source = SourceKind::kMemory;
  tensor.resident = memory;
  kept_bytes_ += tensor.shape.total_bytes();
  const auto machine = read_system_memory();
  const uint64_t limit = options_.budget.kind == BudgetSpec::Kind::kBytes ? options_.budget.bytes
                         : machine.ok() ? static_cast<uint64_t>(kPluginShare * static_cast<double>(machine->available_bytes))
                                        : UINT64_MAX;
  if (kept_bytes_ > limit) {
    failure_ = make_error(ErrorCode::kNoMemory,
                          "{}: expert bytes come from no certain file and must be kept in memory: {} so far, the budget is {}",
                          tensor.name, format_bytes(kept_bytes_), format_bytes(limit));
    state_ = State::kFailed;
    log_error("{}", failure_.error().message());
    return;
  }
  if (finder_.refusal().ok()) {
    log_line_once(LogLevel::kInfo, "experts whose bytes come from no certain file are kept in memory, not streamed");
  }
  if (before) (void)before->read_exactly(tensor.offset, memory, tensor.received_bytes);
}

Status StreamedModel::read(const StreamedTensor& tensor, const std::byte* memory, uint64_t offset, void* data, uint64_t bytes) const {
  std::lock_guard lock(mutex_);
  if (tensor.catalog_layer != nullptr) {
    return catalog_->read_experts(*tensor.catalog_layer, *tensor.catalog_matrix, offset, data, bytes);
  }
  if (tensor.source == SourceKind::kFile) return tensor.file->read_exactly(tensor.offset + offset, data, bytes);
  const std::byte* from = tensor.resident != nullptr ? tensor.resident : memory;
  std::memcpy(data, from + offset, bytes);
  return {};
}

bool StreamedModel::can_finish() const {
  std::lock_guard lock(mutex_);
  if (state_ != State::kCollecting) return true;
  return std::all_of(tensors_.begin(), tensors_.end(), [](const auto& entry) {
    const StreamedTensor& tensor = *entry.second;
    return tensor.source != SourceKind::kUnknown &&
           (tensor.trusted || tensor.source == SourceKind::kMemory || tensor.received_bytes == tensor.shape.total_bytes());
  });
}

Status StreamedModel::finish() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kReady) return {};
  if (state_ == State::kFailed) return failure_;
  failure_ = finish_locked();
  state_ = failure_.ok() ? State::kReady : State::kFailed;
  return failure_;
}

Result<uint64_t> StreamedModel::resolve_budget(const SlotPlan& plan, uint64_t dense_bytes) const {
  uint64_t budget = 0;
  switch (options_.budget.kind) {
    case BudgetSpec::Kind::kBytes: budget = options_.budget.bytes; break;
    case BudgetSpec::Kind::kPercent:
      budget = static_cast<uint64_t>(options_.budget.percent / 100 * static_cast<double>(plan.expert_bytes));
      break;
    case BudgetSpec::Kind::kAuto: {
      const auto machine = read_system_memory();
      if (!machine) return machine.error();
      const SystemMemory& memory = *machine;
      const uint64_t reserve = dense_bytes + static_cast<uint64_t>((1 - kPluginShare) * static_cast<double>(memory.available_bytes));
      const uint64_t left = memory.available_bytes > reserve ? memory.available_bytes - reserve : 0;
      if (left < plan.bytes_min) {
        return make_error(ErrorCode::kNoMemory, "budget: this model needs at least {} for experts, {} has {} left after {} for the rest",
                          format_bytes(plan.bytes_min), memory.bound_by, format_bytes(left), format_bytes(reserve));
      }
      budget = std::min(left, plan.bytes_all);
      const auto line = [](const char* sign, const char* what, uint64_t bytes) {
        log_info("{:1} {:<34}{:>12}", sign, what, format_bytes(bytes));
      };
      log_info("memory, bound by: {}", memory.bound_by);
      line("", "available", memory.available_bytes);
      line("-", "dense weights", dense_bytes);
      line("-", "KV cache, computation, reserve", reserve - dense_bytes);
      line("=", "left for experts", left);
      line("", "all experts, with staging", plan.bytes_all);
      line("", "smallest budget that works", plan.bytes_min);
      line(">", "budget", budget);
      break;
    }
  }
  // All experts fit, padding included, when all of their bytes were granted.
  if (options_.budget.kind == BudgetSpec::Kind::kPercent && options_.budget.percent >= 100) budget = plan.bytes_all;
  if (kept_bytes_ > 0) budget = budget > kept_bytes_ ? budget - kept_bytes_ : 0;
  return fitted_budget(budget, plan, dense_bytes);
}

// A budget that was asked for, in a stock tool: our own program has made its sum already. One that memory cannot hold is
// paid for by the kernel's reclaim.
Result<uint64_t> StreamedModel::fitted_budget(uint64_t budget, const SlotPlan& plan, uint64_t dense_bytes) const {
  const bool own_program = catalog_ && !adopted_;
  if (!options_.fit || own_program || options_.budget.kind == BudgetSpec::Kind::kAuto || budget < plan.bytes_min) return budget;
  const auto machine = read_system_memory();
  if (!machine) return budget;
  const uint64_t rest = dense_bytes + std::max(machine->available_bytes / kFitReserveDivisor, kFitReserveBytesMin);
  const uint64_t fits = machine->available_bytes - std::min(machine->available_bytes, rest);
  if (budget <= fits) return budget;
  if (fits < plan.bytes_min) {
    return make_error(ErrorCode::kNoMemory,
                      "budget: {} do not fit, {} has {} left for experts and this model needs at least {}; SLUICE_FIT=off takes the "
                      "budget as it is",
                      format_bytes(budget), machine->bound_by, format_bytes(fits), format_bytes(plan.bytes_min));
  }
  log_warning("the budget of {} does not fit into memory: {} are taken (SLUICE_FIT=off takes all of it)", format_bytes(budget),
              format_bytes(fits));
  return fits;
}

Status StreamedModel::finish_locked() {
  if (!finder_.refusal().ok()) return finder_.refusal();
  if (Status status = check_engine_options(options_); !status) return status;
  std::vector<LayerSource> sources;
  std::shared_ptr<const File> file;
  for (const auto& [key, tensor] : tensors_) {
    const auto& [layer, role] = key;
    if (tensor->source == SourceKind::kUnknown) {
      return make_error(ErrorCode::kBadFile, "{}: no bytes ever arrived for this tensor", tensor->name);
    }
    if (tensor->source != SourceKind::kFile) continue;
    if (sources.empty() || sources.back().layer != layer) {
      sources.push_back(tensor->catalog_layer != nullptr ? layer_source(*catalog_, *tensor->catalog_layer)
                                                         : LayerSource{.layer = layer,
                                                                       .n_expert = static_cast<uint32_t>(tensor->shape.n_expert),
                                                                       .spans = {},
                                                                       .matrices = {}});
    }
    if (tensor->catalog_layer != nullptr) continue;
    LayerSource& source = sources.back();
    if (source.n_expert != tensor->shape.n_expert) {
      return make_error(ErrorCode::kBadFile, "{}: {} experts, other matrices of the layer have {}", tensor->name,
                        tensor->shape.n_expert, source.n_expert);
    }
    file = tensor->file;
    source.add_matrix(role, tensor->file, tensor->offset, tensor->shape.slab_bytes);
  }
  if (sources.empty()) return {};  // everything is kept in memory
  if (catalog_ && catalog_->pack && catalog_->pack->layout == PackLayout::kNative) {
    if (Status status = use_native_layout(); !status) return status;
  }

  uint32_t top_k = kTopKUnknown;
  uint64_t dense_bytes = 0;  // that a stock tool has mapped: page cache, which counts as available and must stay
  if (catalog_) {
    top_k = catalog_->n_expert_used;
    if (adopted_) dense_bytes = catalog_->dense_bytes;
    make_lenses(*catalog_);
  } else if (const auto found = Catalog::open(file->path(), DirectMode::kOff)) {
    top_k = found->n_expert_used;
    dense_bytes = found->dense_bytes;
    make_lenses(*found);
  }
  if (!options_.trace_path.empty()) {
    if (Status status = open_trace(sources, top_k); !status) return status;
  }
  const std::span<const std::shared_ptr<const File>> model_files =
      catalog_ ? std::span(catalog_->files) : std::span<const std::shared_ptr<const File>>();
  auto device = open_drives({options_.io, options_.direct, options_.mirrors}, sources, model_files);
  if (!device) return device.error();
  if (options_.test_drive) *device = std::make_unique<PacedDevice>(*options_.test_drive);
  if (options_.wrap_device) *device = options_.wrap_device(std::move(*device));
  const SlotPlan plan = plan_layout(sources, top_k, options_.per_layer);
  const auto budget = resolve_budget(plan, dense_bytes);
  if (!budget) return budget.error();
  drop_mapped_pages();  // before their memory is taken for slots
  // Slots are taken at once and kept from the kernel's reclaim: who comes later sees what is really left.
  const MemoryOptions memory{.huge = options_.huge, .lock = options_.lock, .touch = options_.lock != Wish::kNo};
  const bool prefetches = lenses_ && (options_.prefetch == PrefetchMode::kOn || options_.prefetch == PrefetchMode::kAuto);
  auto loader = Loader::create(std::move(sources), std::move(device).value(),
                               {.budget_bytes = *budget,
                                .top_k = top_k,
                                .policy = options_.policy,
                                .per_layer = options_.per_layer,
                                .memory = memory,
                                .fit = options_.fit,
                                .mapped_bytes = dense_bytes,
                                .prefetch = prefetches,
                                .verify_slots = options_.verify_slots,
                                .verify_reads = options_.verify_reads,
                                .poison_released_slots = options_.poison_released_slots});
  if (!loader) return loader.error();
  loader_ = std::move(loader).value();
  if (options_.io.path == IoPath::kSynthetic) log_warning("io synthetic: no expert is read, so answers are meaningless; only times count");
  // Where no slot can be set apart for speculation, or none needs to be, nothing is predicted.
  if (prefetches && loader_->can_prefetch()) {
    prefetcher_ = std::make_unique<Prefetcher>(
        *loader_, lenses_,
        PrefetcherOptions{.plan = options_.prefetch_plan, .governed = options_.prefetch == PrefetchMode::kAuto});
  }
  EngineStats stats;
  loader_->add_stats(stats);
  log_line(LogLevel::kInfo, fmt::format("streaming {} of experts through {} slots ({}), {}{}", format_bytes(plan.expert_bytes),
                                        stats.slots, format_bytes(stats.pool_bytes), stats.io_path,
                                        stats.io_direct ? ", direct" : ", buffered"));
  return {};
}

// The pack's matrices are for certain kernels: ours, or another machine's.
Status StreamedModel::use_native_layout() {
  auto native = NativeLayout::create();
  if (!native) return native.error();
  const std::string& path = catalog_->files.back()->path();
  if ((*native)->tag() != catalog_->pack->native_tag) {
    return make_error(ErrorCode::kUnsupported,
                      "{}: this native pack is for '{}', here it is '{}'; pack the model again (sluice pack MODEL OUT --layout native), or "
                      "use layout raw",
                      path, catalog_->pack->native_tag, (*native)->tag());
  }
  native_ = std::move(*native);
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->catalog_matrix != nullptr && tensor->catalog_matrix->native) tensor->native = native_.get();
  }
  return {};
}

void StreamedModel::make_lenses(const Catalog& catalog) {
  if (options_.prefetch == PrefetchMode::kOff) return;
  auto lenses = std::make_shared<const LensSet>(catalog);
  if (!lenses->missing().empty()) log_line(LogLevel::kInfo, "prefetch: " + lenses->missing());
  if (lenses->empty()) return;
  lenses_ = std::move(lenses);
  if (options_.prefetch == PrefetchMode::kProbe) probe_ = std::make_unique<RecallProbe>(lenses_);
}

bool StreamedModel::wants_output(uint32_t layer, size_t n_row) const {
  std::lock_guard lock(mutex_);
  if (prefetcher_) return prefetcher_->wants_output(layer, n_row);
  return probe_ && n_row > 0 && lenses_->layer_above(layer, 1).has_value();
}

void StreamedModel::see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd) {
  std::lock_guard lock(mutex_);
  if (prefetcher_) prefetcher_->see_output(layer, rows, n_row, n_embd);
  if (probe_) probe_->see_output(layer, rows, n_row, n_embd);
}

// In a graph that was cut, a block comes as three, of which the first that is sure to be there is looked at.
void StreamedModel::see_block(uint32_t layer, const MoeBlock& block, const Routing& routing) {
  const bool lone = block.first.empty();
  if (lone && block.weight->role != MatrixRole::kUp && block.weight->role != MatrixRole::kGateUp) return;
  const ggml_tensor* x = block.x;
  const auto n_row = static_cast<size_t>(block.n_token());
  const auto n_embd = static_cast<size_t>(x->ne[0]);
  const bool plain = x->ne[1] == 1 && x->nb[2] == n_embd * sizeof(float);
  if (prefetcher_) {
    prefetcher_->see_demand(layer, n_row, routing.experts().size());
    if (plain) prefetcher_->see_block(layer, static_cast<const float*>(x->data), n_row, n_embd);
  }
  if (probe_) {
    probe_->see_block(layer, plain ? static_cast<const float*>(x->data) : nullptr, n_row, n_embd, routing.ids(),
                      routing.top_k());
  }
}

std::string StreamedModel::model_path() const {
  if (catalog_) return catalog_->files.front()->path();
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->file) return tensor->file->path();
  }
  return {};
}

Status StreamedModel::open_trace(const std::vector<LayerSource>& sources, uint32_t top_k) {
  RoutingHeader header{.n_layer = sources.back().layer + 1, .top_k = top_k, .model = model_path()};
  header.model = header.model.substr(header.model.find_last_of('/') + 1).substr(0, kTraceNameBytesMax);
  header.record_bytes.resize(header.n_layer, 0);
  for (const LayerSource& source : sources) {
    header.n_expert = std::max(header.n_expert, source.n_expert);
    header.record_bytes[source.layer] = source.record_bytes();
  }
  auto writer = RoutingTraceWriter::create(options_.trace_path, header);
  if (!writer) return writer.error();
  trace_ = std::move(writer).value();
  trace_top_k_ = top_k;
  return {};
}

// A stock tool has read the whole file into the page cache by now. The experts' part of it would only be a second copy.
void StreamedModel::drop_mapped_pages() {
#ifdef POSIX_FADV_DONTNEED
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->mapped == nullptr) continue;
    const uint64_t begin = align_up(reinterpret_cast<uintptr_t>(tensor->mapped), page);
    const uint64_t end = align_down(reinterpret_cast<uintptr_t>(tensor->mapped) + tensor->shape.total_bytes(), page);
    if (begin >= end) continue;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    (void)posix_fadvise(tensor->file->fd(), static_cast<off_t>(tensor->offset), static_cast<off_t>(tensor->shape.total_bytes()),
                        POSIX_FADV_DONTNEED);
  }
#endif
}

const StreamedTensor* StreamedModel::find(uint32_t layer, MatrixRole role) const {
  const auto it = tensors_.find({layer, role});
  return it == tensors_.end() ? nullptr : it->second.get();
}

void StreamedModel::count_choices(uint32_t layer, const Routing& routing, uint32_t n_expert) {
  if (choices_.size() <= layer) choices_.resize(layer + 1);
  std::vector<uint64_t>& counts = choices_[layer];
  if (counts.size() < n_expert) counts.resize(n_expert);
  for (uint32_t i = 0; i < routing.experts().size(); ++i) counts[routing.experts()[i]] += routing.rows(i).size();
}

Status StreamedModel::compute_block(const MoeBlock& block, Routing& routing, BlockExecutor& executor) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kFailed) return failure_;
  SLUICE_ASSERT(state_ == State::kReady, "a block of a model that is not ready");
  const int64_t begin_ns = now_ns();
  const uint32_t layer = block.weight->layer;
  const int64_t staging_before_ns = loader_ ? loader_->staging_ns() : 0;
  const ExecutorCounters executed_before = executor.counters();
  executor.set_mode(options_.fused);
  if (Status status = routing.set(block.ids, static_cast<uint32_t>(block.down->src[0]->ne[2])); !status) {
    return make_error(status.error().code, "layer {}: {}", layer, status.error().text);
  }
  const bool streamed = loader_ && loader_->streams_layer(layer);
  if (streamed) {
    if (Status status = loader_->start(layer, routing.experts()); !status) return status;
    // A warm-up that asks for every expert is nobody's routing.
    if (trace_ && routing.top_k() == trace_top_k_) trace_->append(layer, routing.ids());
    count_choices(layer, routing, static_cast<uint32_t>(block.down->src[0]->ne[2]));
    if (lenses_) see_block(layer, block, routing);
  }
  const int64_t started_ns = now_ns();
  const int64_t stall_before_ns = loader_ ? loader_->stall_ns() : 0;
  const int64_t staging_started_ns = loader_ ? loader_->staging_ns() : 0;
  route_sync_ns_ += started_ns - begin_ns - (staging_started_ns - staging_before_ns);

  // Matrices that are kept in memory have their slabs there, whatever the others do.
  const auto add_resident = [&](ReadyExpert& expert) {
    for (int i = 0; i < kMatrixRoles; ++i) {
      const StreamedTensor* tensor = find(layer, static_cast<MatrixRole>(i));
      if (tensor == nullptr || tensor->source != SourceKind::kMemory) continue;
      expert.slab[static_cast<size_t>(i)] = tensor->resident + routing.experts()[expert.index] * tensor->shape.slab_bytes;
    }
  };
  Status status = executor.begin_block(block, routing);
  if (streamed) {
    while (status.ok()) {
      auto ready = loader_->next();
      if (!ready) {
        status = ready.error();
        break;
      }
      if (ready->empty()) break;
      ready_.assign(ready->begin(), ready->end());
      for (ReadyExpert& expert : ready_) add_resident(expert);
      status = executor.compute(ready_);
    }
    loader_->end();
  } else if (status.ok()) {
    ready_.clear();
    for (uint32_t i = 0; i < routing.experts().size(); ++i) {
      ready_.push_back({.index = i});
      add_resident(ready_.back());
    }
    status = executor.compute(ready_);
  }
  const ExecutorCounters executed = executor.counters() - executed_before;
  executed_ += executed;
  compute_ns_ += now_ns() - started_ns - executed.scatter_ns;
  if (loader_) compute_ns_ -= loader_->stall_ns() - stall_before_ns + loader_->staging_ns() - staging_started_ns;
  return status;
}

EngineStats StreamedModel::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats stats;
  if (loader_) loader_->add_stats(stats);
  stats.pool_bytes += kept_bytes_;
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->source == SourceKind::kMemory) stats.expert_bytes += tensor->shape.total_bytes();
  }
  stats.model = model_path();
  stats.choices = choices_;
  stats.prefetch_mode = prefetch_mode_name(options_.prefetch);
  if (probe_) stats.recall = probe_->counts();
  if (prefetcher_) prefetcher_->add_stats(stats);
  stats.route_sync_s = seconds_of(route_sync_ns_);
  stats.compute_s = seconds_of(compute_ns_);
  stats.scatter_s = seconds_of(executed_.scatter_ns);
  stats.fused_blocks = executed_.fused_blocks;
  stats.generic_blocks = executed_.generic_blocks;
  stats.lone_blocks = executed_.lone_blocks;
  return stats;
}

}  // namespace sluice
