#include "loader/loader.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"

namespace sluice {

namespace {

constexpr uint64_t kVerifyLinesMax = 12;
// Experts handed out at once while others still wait for a slot: small, so that slots come free early.
constexpr size_t kInOrderBatchMax = 4;
// Of a class's slots, at most this part is a generation's side region.
constexpr uint32_t kSideShare = 8;

// "gate", or "gate+up+down" where one read brings them all.
std::string matrix_names(const LayerSource& source, uint32_t span) {
  std::string names;
  for (const MatrixSource& matrix : source.matrices) {
    if (matrix.span != span) continue;
    if (!names.empty()) names += '+';
    names += matrix_role_name(matrix.role);
  }
  return names;
}

// The policy that was asked for, or one that hits where the pool is smaller than what a token asks for.
PolicyKind policy_for_plan(const SlotPlan& plan, const LoaderOptions& options) {
  for (uint32_t i = 0; i < plan.classes.size(); ++i) {
    const auto n_layer = static_cast<uint32_t>(
        std::count_if(plan.layouts.begin(), plan.layouts.end(), [&](const LayerLayout& layout) { return layout.size_class == i; }));
    const uint32_t n_slot = plan.classes[i].n_slot;
    const PolicyKind policy = policy_for_pool(options.policy, n_slot, n_layer, options.top_k);
    if (policy == options.policy) continue;
    log_info("policy {} in place of {}: a token asks for {} experts of {} layers, the pool has {} slots for them",
             policy_name(policy), policy_name(options.policy), uint64_t{n_layer} * options.top_k, n_layer, n_slot);
    return policy;
  }
  return options.policy;
}

}  // namespace

Result<std::unique_ptr<Loader>> Loader::create(std::vector<LayerSource> sources, std::unique_ptr<Device> device,
                                               const LoaderOptions& options) {
  std::unique_ptr<Loader> loader(new Loader);
  loader->options_ = options;
  loader->plan_ = plan_layout(sources, options.top_k, options.per_layer);
  if (Status status = plan_slots(loader->plan_, options.budget_bytes); !status) return status.error();
  for (const LayerSource& source : sources) {
    if (!options.verify_reads || source.checksums) continue;
    return make_error(ErrorCode::kBadArgument, "verify_reads: {} has no checksums; a pack of it has (sluice pack)",
                      source.spans.front().file->path());
  }

  loader->policy_ = policy_for_plan(loader->plan_, options);
  PoolSpec spec{.policy = loader->policy_,
                .memory = options.memory,
                .poison_released_slots = options.poison_released_slots};
  for (const ClassPlan& size_class : loader->plan_.classes) {
    // A pool at its floor, or one that holds everything, has no use for a side region.
    const uint32_t spare = size_class.n_slot - size_class.n_slot_min;
    const bool wanted = options.prefetch && size_class.n_slot < size_class.n_slot_all;
    const uint32_t n_side = wanted ? std::min(spare / spec.side_generations, size_class.n_slot / kSideShare) : 0;
    loader->can_prefetch_ |= n_side > 0;
    spec.classes.push_back({.slot_bytes = size_class.slot_bytes,
                            .n_slot = size_class.n_slot,
                            .n_slot_min = size_class.n_slot_min,
                            .n_side = n_side});
  }
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const uint32_t layer = sources[i].layer;
    if (layer >= spec.layer_class.size()) {
      spec.layer_class.resize(layer + 1, PoolSpec::kNoClass);
      loader->source_of_layer_.resize(layer + 1, kNone);
    }
    SLUICE_ASSERT(loader->source_of_layer_[layer] == kNone, "layer {} twice", layer);
    spec.layer_class[layer] = loader->plan_.layouts[i].size_class;
    loader->source_of_layer_[layer] = i;
    spec.n_expert = std::max(spec.n_expert, sources[i].n_expert);
  }
  auto pool = ResidentPool::create(spec);
  if (!pool) return pool.error();
  loader->pool_ = std::move(pool).value();
  for (const std::string& line : loader->pool_->memory_missing()) log_line_once(LogLevel::kInfo, line);
  auto staging = SlotMemory::create(loader->plan_.staging_bytes * loader->plan_.n_staging);
  if (!staging) return staging.error();
  loader->staging_memory_ = std::move(staging).value();
  for (uint32_t i = loader->plan_.n_staging; i > 0; --i) loader->staging_free_.push_back(i - 1);

  loader->layers_.resize(loader->source_of_layer_.size());
  loader->prefetch_layers_.resize(loader->source_of_layer_.size());
  loader->demand_of_layer_.resize(loader->source_of_layer_.size());
  loader->prefetch_ns_.resize(loader->pool_->n_slot());
  loader->sources_ = std::move(sources);
  loader->device_ = std::move(device);
  // Not the slots: that brings too little for the memory limit it counts against (docs/experiments.tsv).
  if (loader->plan_.n_staging > 0) {
    loader->device_->register_memory({loader->staging_memory_.data(), loader->staging_memory_.bytes()});
  }
  if (options.fit) {
    loader->watch_.emplace(options.memory_root);
    // A machine that does not tell what is left cannot be followed.
    if (const auto sample = loader->watch_->sample()) {
      loader->governor_.emplace(GovernorOptions{
          .pool_bytes_max = loader->pool_->bytes(),
          .pool_bytes_min = loader->pool_->bytes_min(),
          .reserve_bytes = governor_reserve_bytes(sample->available_bytes - std::min(sample->available_bytes, options.mapped_bytes))});
    }
  }
  return loader;
}

Loader::~Loader() {
  if (active_) end();
}

Status Loader::start(uint32_t layer, std::span<const uint32_t> experts) {
  std::lock_guard lock(mutex_);
  return start_locked(layer, experts);
}

Result<std::span<const ReadyExpert>> Loader::next() {
  std::lock_guard lock(mutex_);
  return next_locked();
}

void Loader::end() {
  std::lock_guard lock(mutex_);
  end_locked();
}

Status Loader::start_locked(uint32_t layer, std::span<const uint32_t> experts) {
  SLUICE_ASSERT(!active_, "a demand of layer {} is still open", layer_);
  SLUICE_ASSERT(streams_layer(layer), "layer {} is not streamed", layer);
  const LayerSource& source = sources_[source_of_layer_[layer]];
  for (const uint32_t expert : experts) {
    if (expert >= source.n_expert) {
      return make_error(ErrorCode::kBadArgument, "layer {}: the router chose expert {}, the layer has {}", layer,
                        static_cast<int32_t>(expert), source.n_expert);
    }
  }
  const bool new_pass = last_layer_ != kNone && layer <= last_layer_;
  if (new_pass) follow_memory();
  const bool all_hits = std::all_of(experts.begin(), experts.end(),
                                    [&](uint32_t expert) { return pool_->find({layer, expert}).has_value(); });
  if (!spoiled_.ok()) return spoiled_;
  if (!all_hits) {
    if (Status status = check_files(source); !status) return status;
  }
  if (new_pass) pool_->advance();
  last_layer_ = layer;
  demand_of_layer_[layer] = ++demands_;
  active_ = true;
  layer_ = layer;
  failure_ = {};
  in_order_ = false;
  n_loading_ = 0;
  n_remaining_ = static_cast<uint32_t>(experts.size());
  order_next_ = 0;
  entries_.clear();
  order_.clear();
  unplaced_.clear();
  handed_.clear();
  ready_.clear();
  has_read_ = false;
  if (options_.prefetch) collect(false);  // what has arrived meanwhile is a hit

  ExpertCounters& counters = layers_[layer];
  counters.requests += experts.size();
  int64_t hidden_ns = 0;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    Entry entry{.expert = experts[i]};
    const ExpertId id{layer, experts[i]};
    pool_->note_access(id);
    entries_.push_back(entry);
    const auto slot = pool_->find(id);
    if (slot && pool_->is_ready(*slot)) {
      if (pool_->is_speculative(*slot)) {
        PrefetchCounters& prefetch = prefetch_layers_[layer];
        ++prefetch.ready_on_time;
        prefetch.bytes_taken += source.record_bytes();
        hidden_ns = std::max(hidden_ns, prefetch_ns_[slot->slot]);
        pool_->promote(*slot);
      } else {
        pool_->pin(*slot);
      }
      entries_[i].slot = *slot;
      entries_[i].state = Entry::State::kReady;
      ++counters.hits;
      order_.push_back(i);
    } else {
      ++counters.misses;
      if (slot) take_over(i, *slot);
    }
  }
  prefetch_layers_[layer].hidden_s += seconds_of(hidden_ns);
  if (options_.prefetch) cancel_prefetches(layer);
  for (uint32_t i = 0; i < experts.size(); ++i) {
    if (entries_[i].state == Entry::State::kReady) continue;
    order_.push_back(i);
    if (entries_[i].state == Entry::State::kLoading) continue;  // a prefetch that was on its way
    if (!unplaced_.empty() || !place(i)) {
      unplaced_.push_back(i);
      ++counters.unplaced;
    }
  }
  in_order_ = !unplaced_.empty();
  submit_waiting();
  collect(false);  // a device may start what was submitted only when it is polled
  return {};
}

Status Loader::check_files(const LayerSource& source) const {
  const File* checked = nullptr;
  for (const SpanSource& span : source.spans) {
    if (span.file.get() == checked) continue;
    checked = span.file.get();
    if (Status status = checked->check_unchanged(); !status) return status;
  }
  return {};
}

// Between two passes, a few times a second: nothing is pinned then, so the pool can have its new size at once.
void Loader::follow_memory() {
  if (!governor_) return;
  const int64_t now = now_ns();
  if (!governor_->is_due(now)) return;
  const auto sample = watch_->sample();
  if (!sample) return;
  const uint64_t before = governor_->pool_bytes();
  const uint64_t bytes = governor_->update({.now_ns = now,
                                            .available_bytes = sample->available_bytes - std::min(sample->available_bytes, options_.mapped_bytes),
                                            .stalled_us = sample->stalled_us,
                                            .stalls_are_own = sample->stalls_are_own});
  if (bytes == before) return;
  pool_->resize(bytes);
  if (bytes < before && governor_->shrinks() == 1) {
    log_info("memory runs short: the pool gives memory back, {} of {} at first", format_bytes(before - bytes), format_bytes(before));
  }
}

// Takes a slot for the entry and queues its reads; false when there is no slot for it now.
bool Loader::place(uint32_t index) {
  Entry& entry = entries_[index];
  auto slot = pool_->begin_load({layer_, entry.expert});
  if (!slot) return false;
  entry.slot = *slot;
  entry.state = Entry::State::kLoading;
  const uint32_t load = begin_load({layer_, entry.expert}, *slot, index);
  for (uint32_t span = 0; span < loads_[load].reads_left; ++span) waiting_.push_back({.load = load, .span = span});
  ++n_loading_;
  ++layers_[layer_].loads;
  return true;
}

uint32_t Loader::begin_load(ExpertId id, SlotRef slot, uint32_t entry) {
  uint32_t index = static_cast<uint32_t>(loads_.size());
  if (loads_free_.empty()) {
    loads_.emplace_back();
  } else {
    index = loads_free_.back();
    loads_free_.pop_back();
  }
  loads_[index] = {.id = id,
                   .slot = slot,
                   .entry = entry,
                   .reads_left = static_cast<uint32_t>(sources_[source_of_layer_[id.layer]].spans.size()),
                   .is_prefetch = entry == kNone,
                   .begin_ns = now_ns()};
  return index;
}

void Loader::prefetch(uint32_t layer, std::span<const uint32_t> experts, uint64_t since_demand) {
  std::lock_guard lock(mutex_);
  SLUICE_ASSERT(streams_layer(layer), "layer {} is not streamed", layer);
  const LayerSource& source = sources_[source_of_layer_[layer]];
  PrefetchCounters& counters = prefetch_layers_[layer];
  counters.predicted += experts.size();
  if (demand_of_layer_[layer] > since_demand) {
    counters.late += experts.size();
    return;
  }
  bool usable = options_.prefetch && spoiled_.ok() && check_files(source).ok();
  for (const uint32_t expert : experts) {
    SLUICE_ASSERT(expert < source.n_expert, "layer {}: expert {} of {}", layer, expert, source.n_expert);
    const ExpertId id{layer, expert};
    if (pool_->find(id)) continue;
    const auto slot = usable ? pool_->begin_speculative_load(id) : Result<SlotRef>(Error{});
    if (!slot) {
      usable = false;  // nor is there room for the next
      ++counters.refused;
      continue;
    }
    const uint32_t load = begin_load(id, *slot, kNone);
    for (uint32_t span = 0; span < loads_[load].reads_left; ++span) {
      waiting_prefetch_.push_back({.load = load, .span = span, .is_prefetch = true});
    }
    ++counters.submitted;
  }
  collect(false);
}

// The current demand wants an expert that is being prefetched.
void Loader::take_over(uint32_t index, SlotRef slot) {
  pool_->promote(slot);
  const auto found = std::find_if(loads_.begin(), loads_.end(), [&](const Load& load) { return load.reads_left > 0 && load.slot == slot; });
  SLUICE_ASSERT(found != loads_.end(), "slot {} is loading and nothing is being read", slot.slot);
  const auto load_index = static_cast<uint32_t>(found - loads_.begin());
  Load& load = *found;
  load.entry = index;
  load.cancelled = false;
  entries_[index].slot = slot;
  entries_[index].state = Entry::State::kLoading;
  ++n_loading_;
  has_read_ = true;
  ++layers_[layer_].loads;
  ++prefetch_layers_[layer_].not_ready;
  for (uint32_t tag = 0; tag < reads_.size(); ++tag) {
    if (reads_[tag].load == load_index) device_->raise(tag);
  }
  // What waits goes over to the demand's line; what failed already is read again.
  std::erase_if(waiting_prefetch_, [&](const SpanRead& read) {
    if (read.load != load_index) return false;
    waiting_.push_back({.load = load_index, .span = read.span});
    return true;
  });
  for (uint32_t span = 0; load.failed_spans != 0; ++span, load.failed_spans >>= 1) {
    if ((load.failed_spans & 1) == 0) continue;
    waiting_.push_back({.load = load_index, .span = span});
    ++load.reads_left;
  }
}

// The router of `layer` has spoken: what was predicted for it in vain and has not started is dropped.
void Loader::cancel_prefetches(uint32_t layer) {
  const auto is_vain = [&](uint32_t load) { return loads_[load].id.layer == layer && loads_[load].entry == kNone; };
  // Its bytes are missing, should the load go on for a later demand.
  const auto drop = [&](uint32_t load, uint32_t span) {
    loads_[load].cancelled = true;
    loads_[load].failed_spans |= 1u << span;
    if (--loads_[load].reads_left == 0) end_load(load);
  };
  std::vector<SpanRead> dropped;
  std::erase_if(waiting_prefetch_, [&](const SpanRead& read) {
    if (!is_vain(read.load)) return false;
    dropped.push_back(read);
    return true;
  });
  for (const SpanRead& read : dropped) drop(read.load, read.span);
  for (uint32_t tag = 0; tag < reads_.size(); ++tag) {
    SpanRead& read = reads_[tag];
    if (read.load == kNone || !is_vain(read.load) || !device_->cancel(tag)) continue;
    const SpanRead cancelled = read;
    if (cancelled.staging != kNone) staging_free_.push_back(cancelled.staging);
    read.load = kNone;
    reads_free_.push_back(tag);
    drop(cancelled.load, cancelled.span);
  }
}

// Demand reads first. Of the staging buffers, half are never lent to prefetches.
void Loader::submit_waiting() {
  const auto submit_from = [&](std::deque<SpanRead>& line, size_t staging_left_min) {
    while (!line.empty()) {
      SpanRead read = line.front();
      if (is_staged(loads_[read.load])) {
        if (staging_free_.size() <= staging_left_min) return;
        read.staging = staging_free_.back();
        staging_free_.pop_back();
      }
      line.pop_front();
      submit(read);
    }
  };
  submit_from(waiting_, 0);
  if (waiting_.empty()) submit_from(waiting_prefetch_, plan_.n_staging / 2);
}

void Loader::submit(SpanRead read) {
  const Load& load = loads_[read.load];
  const uint32_t source_index = source_of_layer_[load.id.layer];
  const SpanSource& span = sources_[source_index].spans[read.span];
  const uint64_t begin = span.offset_of(load.id.expert);
  const uint64_t align = span.file->align_bytes();
  const uint64_t aligned_begin = align_down(begin, align);
  std::byte* destination = read.staging != kNone
                               ? staging_memory_.data() + read.staging * plan_.staging_bytes
                               : pool_->slot_data(load.slot) + plan_.layouts[source_index].regions[read.span].offset;
  uint32_t tag = static_cast<uint32_t>(reads_.size());
  if (reads_free_.empty()) {
    reads_.emplace_back();
  } else {
    tag = reads_free_.back();
    reads_free_.pop_back();
  }
  if (!read.is_prefetch) has_read_ = true;
  reads_[tag] = read;
  device_->submit({.file = span.file.get(),
                   .offset = aligned_begin,
                   .bytes = align_up(begin + span.bytes, align) - aligned_begin,
                   .bytes_needed = begin + span.bytes - aligned_begin,
                   .destination = destination,
                   .tag = tag,
                   .priority = read.is_prefetch ? ReadPriority::kPrefetch : ReadPriority::kDemand});
}

// Where a span's bytes are inside an expert's slot.
std::byte* Loader::span_data(ExpertId id, SlotRef slot, uint32_t span) const {
  const uint32_t source_index = source_of_layer_[id.layer];
  const LayerLayout& layout = plan_.layouts[source_index];
  std::byte* region = pool_->slot_data(slot) + layout.regions[span].offset;
  return layout.staged ? region : region + sources_[source_index].spans[span].skip_of(id.expert);
}

// Takes what the device has finished into the slots, and starts reads that waited for staging.
void Loader::collect(bool block) {
  completions_.clear();
  if (block) {
    const int64_t begin_ns = now_ns();
    device_->wait(completions_);
    stall_ns_ += now_ns() - begin_ns;
  } else {
    device_->poll(completions_);
  }
  for (ReadCompletion& completion : completions_) {
    const SpanRead read = reads_[completion.tag];
    reads_[completion.tag].load = kNone;
    reads_free_.push_back(static_cast<uint32_t>(completion.tag));
    Load& load = loads_[read.load];
    const SpanSource& span = sources_[source_of_layer_[load.id.layer]].spans[read.span];
    if (completion.status.ok()) {
      if (load.is_prefetch) {
        prefetch_layers_[load.id.layer].bytes += span.bytes;
      } else {
        layers_[load.id.layer].bytes_read += span.bytes;
      }
      if (read.staging != kNone) {
        const int64_t begin_ns = now_ns();
        std::memcpy(span_data(load.id, load.slot, read.span),
                    staging_memory_.data() + read.staging * plan_.staging_bytes + span.skip_of(load.id.expert), span.bytes);
        staging_ns_ += now_ns() - begin_ns;
      }
      if (options_.verify_reads) completion.status = compare_read(load, read.span);
    }
    if (read.staging != kNone) staging_free_.push_back(read.staging);
    --load.reads_left;
    if (!completion.status.ok()) {
      if (!read.is_prefetch) {
        fail_demand(load, read.span, completion.status.error());
      } else if (load.entry != kNone && failure_.ok()) {
        waiting_.push_back({.load = read.load, .span = read.span});  // the demand's own read, which may fail it
        ++load.reads_left;
      } else {
        load.failed_spans |= 1u << read.span;
      }
    }
    if (load.reads_left == 0) end_load(read.load);
  }
  submit_waiting();
}

void Loader::fail_demand(const Load& load, uint32_t span, const Error& error) {
  if (!failure_.ok()) return;
  const std::string matrices = matrix_names(sources_[source_of_layer_[load.id.layer]], span);
  failure_ = Error{error.code, fmt::format("layer {} expert {} ({}): {}", load.id.layer, load.id.expert, matrices, error.text),
                   error.system_error};
}

// No read of the load waits or is in flight any more.
void Loader::end_load(uint32_t index) {
  Load& load = loads_[index];
  if (load.is_prefetch) end_prefetch(load);
  if (load.entry != kNone) {
    Entry& entry = entries_[load.entry];
    --n_loading_;
    // After a failure no slot of this demand is trusted: a record may be only partly there.
    if (failure_.ok()) {
      pool_->finish_load(load.slot);
      entry.state = Entry::State::kReady;
    } else {
      pool_->fail_load(load.slot);
      entry.state = Entry::State::kReleased;
    }
  }
  load.slot = {};
  load.entry = kNone;
  loads_free_.push_back(index);
}

// Counts, and settles the slot of one that nobody has asked for.
void Loader::end_prefetch(Load& load) {
  PrefetchCounters& counters = prefetch_layers_[load.id.layer];
  const int64_t load_ns = now_ns() - load.begin_ns;
  if (load.cancelled) {
    ++counters.cancelled;
  } else {
    counters.seconds += seconds_of(load_ns);
  }
  if (load.entry != kNone) {
    if (!failure_.ok()) return;
    ++counters.materialised;
    counters.bytes_taken += sources_[source_of_layer_[load.id.layer]].record_bytes();
    return;
  }
  // The bytes of a file that was changed meanwhile are nobody's; the next demand says so.
  const bool good = !load.cancelled && load.failed_spans == 0 && check_files(sources_[source_of_layer_[load.id.layer]]).ok();
  if (!good) {
    counters.failed += !load.cancelled;
    pool_->fail_load(load.slot);
    return;
  }
  ++counters.materialised;
  prefetch_ns_[load.slot.slot] = load_ns;
  pool_->finish_load(load.slot);
}

void Loader::release(uint32_t index) {
  Entry& entry = entries_[index];
  if (entry.state != Entry::State::kReady && entry.state != Entry::State::kHanded) return;
  pool_->unpin(entry.slot);
  entry.state = Entry::State::kReleased;
}

ReadyExpert Loader::ready_expert(uint32_t index) const {
  ReadyExpert expert{.index = index};
  const LayerSource& source = sources_[source_of_layer_[layer_]];
  const ExpertId id{layer_, entries_[index].expert};
  for (const MatrixSource& matrix : source.matrices) {
    expert.slab[static_cast<size_t>(matrix.role)] = span_data(id, entries_[index].slot, matrix.span) + matrix.offset;
  }
  return expert;
}

Result<std::span<const ReadyExpert>> Loader::next_locked() {
  SLUICE_ASSERT(active_, "next without start");
  if (in_order_) {
    for (const uint32_t index : handed_) {
      if (unplaced_.empty()) break;
      release(index);
      if (place(unplaced_.front())) unplaced_.pop_front();
    }
    submit_waiting();
  }
  handed_.clear();
  ready_.clear();
  if (n_remaining_ == 0) {
    // Written to while it was read: bytes that were handed out may be the new ones, and so may what slots hold.
    if (failure_.ok() && has_read_) failure_ = spoiled_ = check_files(sources_[source_of_layer_[layer_]]);
    if (!failure_.ok()) return failure_.error();
    return std::span<const ReadyExpert>();
  }
  collect(false);
  const auto hand_out = [&](uint32_t index) {
    entries_[index].state = Entry::State::kHanded;
    handed_.push_back(index);
    ready_.push_back(ready_expert(index));
    --n_remaining_;
  };
  while (failure_.ok()) {
    if (in_order_) {
      while (order_next_ < order_.size() && ready_.size() < kInOrderBatchMax &&
             entries_[order_[order_next_]].state == Entry::State::kReady) {
        hand_out(order_[order_next_++]);
      }
    } else {
      for (const uint32_t index : order_) {
        if (entries_[index].state == Entry::State::kReady) hand_out(index);
      }
    }
    if (!ready_.empty()) break;
    SLUICE_ASSERT(n_loading_ > 0, "layer {}: {} experts remain and none is being read", layer_, n_remaining_);
    collect(true);
  }
  if (failure_.ok() && options_.verify_slots) {
    for (const uint32_t index : handed_) {
      if (Status status = compare_slot({layer_, entries_[index].expert}, entries_[index].slot); !status) {
        failure_ = status;
        break;
      }
    }
  }
  if (!failure_.ok()) return failure_.error();
  return std::span<const ReadyExpert>(ready_);
}

void Loader::end_locked() {
  SLUICE_ASSERT(active_, "end without start");
  // A demand that was given up may still have reads under way into its slots.
  if (n_remaining_ > 0 || !failure_.ok()) {
    if (failure_.ok() && !waiting_.empty()) failure_ = make_error(ErrorCode::kCancelled, "layer {}: given up", layer_);
    while (!waiting_.empty()) {
      const uint32_t load = waiting_.front().load;
      waiting_.pop_front();
      if (--loads_[load].reads_left == 0) end_load(load);
    }
    while (n_loading_ > 0) collect(true);
  }
  // In the order of start, so that the policy sees the same history whatever order the bytes arrived in.
  for (uint32_t index = 0; index < entries_.size(); ++index) release(index);
  active_ = false;
}

Status Loader::compare_slot(ExpertId id, SlotRef slot) {
  const LayerSource& source = sources_[source_of_layer_[id.layer]];
  for (const MatrixSource& matrix : source.matrices) {
    const std::shared_ptr<const File>& file = source.spans[matrix.span].file;
    const std::byte* held = span_data(id, slot, matrix.span) + matrix.offset;
    verify_buffer_.resize(matrix.slab_bytes);
    if (Status status = file->read_exactly(source.slab_offset(matrix, id.expert), verify_buffer_.data(), matrix.slab_bytes); !status) {
      return status;
    }
    const auto [at, unused] = std::mismatch(verify_buffer_.begin(), verify_buffer_.end(), held);
    if (at != verify_buffer_.end()) {
      return make_error(ErrorCode::kBadFile, "slot {} differs from {}: layer {} expert {} ({}), byte {}", slot.slot,
                        file->path(), id.layer, id.expert, matrix_role_name(matrix.role),
                        at - verify_buffer_.begin());
    }
  }
  ++verified_slots_;
  return {};
}

// What has arrived of an expert against the checksums that came with the files.
Status Loader::compare_read(const Load& load, uint32_t span) {
  const LayerSource& source = sources_[source_of_layer_[load.id.layer]];
  for (size_t i = 0; i < source.matrices.size(); ++i) {
    const MatrixSource& matrix = source.matrices[i];
    if (matrix.span != span) continue;
    const std::byte* slab = span_data(load.id, load.slot, span) + matrix.offset;
    if (pack_checksum(slab, matrix.slab_bytes) == (*source.checksums)[load.id.expert * source.matrices.size() + i]) continue;
    return make_error(ErrorCode::kBadFile, "{}: {} bytes at {} ({}) differ from their checksum", source.spans[span].file->path(),
                      matrix.slab_bytes, source.slab_offset(matrix, load.id.expert), matrix_role_name(matrix.role));
  }
  ++verified_reads_;
  return {};
}

Result<uint64_t> Loader::verify_all_slots() {
  std::lock_guard lock(mutex_);
  uint64_t faults = 0;
  pool_->for_each_ready([&](SlotRef slot, ExpertId id) {
    if (Status status = compare_slot(id, slot); !status) {
      if (faults++ < kVerifyLinesMax) log_error("verify: {}", status.error().message());
    }
  });
  return faults;
}

void Loader::add_stats(EngineStats& stats) const {
  std::lock_guard lock(mutex_);
  stats.streaming = true;
  stats.budget_bytes += options_.budget_bytes;
  stats.budget_bytes_min += plan_.bytes_min;
  stats.expert_bytes += plan_.expert_bytes;
  stats.slots += pool_->n_slot();
  stats.policy = policy_name(policy_);
  stats.pool_bytes += plan_.bytes - (pool_->bytes() - pool_->usable_bytes());
  if (governor_) {
    stats.pool_shrinks += governor_->shrinks();
    stats.pool_grows += governor_->grows();
  }
  if (stats.layers.size() < layers_.size()) stats.layers.resize(layers_.size());
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    ExpertCounters counters = layers_[layer];
    counters.evictions = pool_->evictions(layer);
    stats.layers[layer] += counters;
    stats.experts += counters;
  }
  if (stats.prefetch_layers.size() < prefetch_layers_.size()) stats.prefetch_layers.resize(prefetch_layers_.size());
  for (uint32_t layer = 0; layer < prefetch_layers_.size(); ++layer) {
    stats.prefetch_layers[layer] += prefetch_layers_[layer];
    stats.prefetch += prefetch_layers_[layer];
  }
  const DeviceStats device = device_->stats();
  stats.io_path = device_->name();
  stats.io_direct = std::all_of(sources_.begin(), sources_.end(), [](const LayerSource& source) {
    return std::all_of(source.spans.begin(), source.spans.end(), [](const SpanSource& span) { return span.file->direct(); });
  });
  stats.io_drives = device_->drive_stats();
  stats.io_reads += device.reads;
  stats.io_bytes += device.bytes;
  stats.io_retries += device.retries;
  stats.io_errors += device.errors;
  stats.io_seconds += seconds_of(device.busy_ns);
  stats.stall_s += seconds_of(stall_ns_);
  stats.staging_s += seconds_of(staging_ns_);
  stats.verified_slots += verified_slots_;
  stats.verified_reads += verified_reads_;
}

}  // namespace sluice
