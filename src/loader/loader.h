// "These experts are needed": turns a layer's routed experts into pinned slots with the right bytes in them. The face
// of the engine below the computation: it joins the pool (slots), the policy (victims) and the device (reads).
//
// One layer of one batch is a Demand:
//   start      every distinct expert once, in order of first appearance. Hits are pinned, then misses take slots and
//              their reads are started, in order, until no slot is left; the others are unplaced.
//   next       the experts that can be computed now and have not been handed out: first the hits, then whatever has
//              arrived. Blocks only when nothing is ready. Asking again says that the last batch was computed.
//   end        all pins are dropped, in the order of start.
// When experts are unplaced, they are handed out strictly in order, and each computed expert gives its slot to the
// next unplaced one at once; so the course of a demand depends on routing and pool size alone, never on the drive's
// timing, and a replay (policy/replay.h) predicts every hit and miss.
//
// Prefetch   reads nobody waits for yet, of a later layer's experts, into the pool's side region. They start only where no
//            demand read waits. A demand takes over what is there (a hit) or on its way (raised, never read twice, a
//            miss); what its layer turns out not to want and has not started is dropped. A prefetch that fails is
//            counted and harms nothing: a demand reads again. With prefetch the course of demands depends on the
//            drive's timing too, so a replay no longer predicts it; results do not change.
//
// Units    time in ns; bytes.
// Owns     pool, staging, device.
// Errors   create: kNoMemory for a budget below the smallest; kBadArgument for verify_reads without checksums.
//          start: kBadArgument for an expert id outside the layer (nothing is read then). next: the first read error;
//          the failed slot is empty again, the demand is over, other demands go on. A file that was changed is noticed
//          before anything is read, then what is resident stays usable; or after the reads, then nothing does.
// Threads  one Demand at a time: the caller holds the model's lock while it lives. prefetch and add_stats may be called
//          from any thread meanwhile; they wait while a demand waits for the drive. Threads exist only inside the device.
// Cost     no allocation in a steady state: all lists keep their capacity.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/device.h"
#include "io/system_memory.h"
#include "loader/budget_governor.h"
#include "loader/slot_plan.h"
#include "pool/resident_pool.h"
#include "trace/engine_stats.h"

namespace sluice {

struct LoaderOptions {
  uint64_t budget_bytes = 0;
  uint32_t top_k = 1;
  PolicyKind policy = PolicyKind::kLfru;
  bool per_layer = false;              // every layer has slots of its own
  MemoryOptions memory;                // of slots
  bool fit = false;                    // the pool follows the memory that is left (loader/budget_governor.h)
  uint64_t mapped_bytes = 0;           // weights in the page cache that must stay there, though they count as available
  std::string memory_root;             // where /proc and /sys are, for tests
  bool prefetch = false;               // a side region is set apart, so that prefetch() can be used
  bool verify_slots = false;           // every slot that is handed out is compared with the file first
  bool verify_reads = false;           // every read is compared with the files' checksums
  bool poison_released_slots = false;  // for tests
};

// An expert whose bytes may be read until the next call on its Demand.
struct ReadyExpert {
  uint32_t index = 0;  // position in the list given to start
  std::array<const std::byte*, kMatrixRoles> slab = {};  // by MatrixRole; nullptr where the layer has no such matrix
};

class Loader {
 public:
  static Result<std::unique_ptr<Loader>> create(std::vector<LayerSource> sources, std::unique_ptr<Device> device,
                                                const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;

  // Starts the demand of `layer`; there must be none. `experts` are distinct.
  Status start(uint32_t layer, std::span<const uint32_t> experts);
  // Empty when everything has been handed out and computed. The span is valid until the next call.
  Result<std::span<const ReadyExpert>> next();
  // Ends the demand, also after an error or early; waits for reads into its slots.
  void end();

  // Begins to read experts of `layer`, best first, as long as the side region has room: those that are neither resident
  // nor on their way. Nothing happens where the layer was demanded after demand number `since_demand`: too late.
  void prefetch(uint32_t layer, std::span<const uint32_t> experts, uint64_t since_demand);
  bool can_prefetch() const { return can_prefetch_; }
  // How many demands were started.
  uint64_t demands() const { return demands_; }
  // What became of a layer's prefetches so far.
  PrefetchCounters prefetch_counters(uint32_t layer) const {
    std::lock_guard lock(mutex_);
    return prefetch_layers_[layer];
  }

  // Compares every ready slot with the file: slots that differ, and a line for the first dozen.
  Result<uint64_t> verify_all_slots();

  bool streams_layer(uint32_t layer) const { return layer < source_of_layer_.size() && source_of_layer_[layer] != kNone; }
  const SlotPlan& plan() const { return plan_; }
  const ResidentPool& pool() const { return *pool_; }
  // That is in effect: another than was asked for when a pool is too small for it.
  PolicyKind policy() const { return policy_; }
  // Adds this loader's counters to `stats`.
  void add_stats(EngineStats& stats) const;
  int64_t stall_ns() const {  // waiting for reads
    std::lock_guard lock(mutex_);
    return stall_ns_;
  }
  int64_t staging_ns() const {  // copying from staging buffers
    std::lock_guard lock(mutex_);
    return staging_ns_;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  struct Entry {  // one expert of the current demand
    uint32_t expert = 0;
    SlotRef slot;
    enum class State : uint8_t { kUnplaced, kLoading, kReady, kHanded, kReleased } state = State::kUnplaced;
  };
  struct Load {  // an expert on its way into a slot, for a demand or not
    ExpertId id;
    SlotRef slot;
    uint32_t entry = kNone;       // of the current demand; kNone: a prefetch that nobody has asked for
    uint32_t reads_left = 0;      // waiting or in flight
    uint32_t failed_spans = 0;    // bit by span: a prefetch's reads that failed and may be repeated
    bool is_prefetch = false;     // begun as one
    bool cancelled = false;       // some of its reads were dropped
    int64_t begin_ns = 0;
  };
  struct SpanRead {  // one span of one load, waiting for a staging buffer or in flight
    uint32_t load = kNone;  // kNone: the record is free
    uint32_t span = 0;
    uint32_t staging = kNone;
    bool is_prefetch = false;
  };

  Loader() = default;
  Status start_locked(uint32_t layer, std::span<const uint32_t> experts);
  Result<std::span<const ReadyExpert>> next_locked();
  void end_locked();
  uint32_t begin_load(ExpertId id, SlotRef slot, uint32_t entry);
  void take_over(uint32_t entry, SlotRef slot);
  void cancel_prefetches(uint32_t layer);
  void end_load(uint32_t load);
  void end_prefetch(Load& load);
  void fail_demand(const Load& load, uint32_t span, const Error& error);
  bool is_staged(const Load& load) const { return plan_.layouts[source_of_layer_[load.id.layer]].staged; }
  void follow_memory();
  bool place(uint32_t entry);
  Status check_files(const LayerSource& source) const;
  void submit_waiting();
  void submit(SpanRead read);
  void collect(bool block);
  void release(uint32_t entry);
  ReadyExpert ready_expert(uint32_t entry) const;
  std::byte* span_data(ExpertId id, SlotRef slot, uint32_t span) const;
  Status compare_slot(ExpertId id, SlotRef slot);
  Status compare_read(const Load& load, uint32_t span);

  mutable std::mutex mutex_;
  bool can_prefetch_ = false;  // some class has a side region
  std::vector<LayerSource> sources_;
  std::vector<uint32_t> source_of_layer_;
  SlotPlan plan_;
  LoaderOptions options_;
  PolicyKind policy_ = PolicyKind::kLfru;
  std::unique_ptr<ResidentPool> pool_;
  std::optional<MemoryWatch> watch_;
  std::optional<BudgetGovernor> governor_;
  SlotMemory staging_memory_;
  std::vector<uint32_t> staging_free_;
  std::unique_ptr<Device> device_;  // last, so that it is gone before the memory its reads land in

  // The current demand.
  bool active_ = false;
  uint32_t layer_ = 0;
  uint32_t last_layer_ = kNone;
  std::vector<Entry> entries_;
  std::vector<uint32_t> order_;         // entries in the order they are handed out when some are unplaced
  size_t order_next_ = 0;               // first of order_ not yet handed out
  std::deque<uint32_t> unplaced_;
  uint32_t n_remaining_ = 0;            // not yet handed out
  uint32_t n_loading_ = 0;
  bool in_order_ = false;
  Status failure_;
  Status spoiled_;  // a file changed while slots were filled from it: no slot is trusted any more
  std::vector<ReadyExpert> ready_;
  std::vector<uint32_t> handed_;        // entries of the last batch
  std::atomic<uint64_t> demands_ = 0;
  std::vector<uint64_t> demand_of_layer_;  // the number of each layer's last demand
  bool has_read_ = false;               // the current demand has
  std::vector<ReadCompletion> completions_;
  std::vector<std::byte> verify_buffer_;

  // Reads of demands and prefetches.
  std::deque<SpanRead> waiting_;           // for a staging buffer
  std::deque<SpanRead> waiting_prefetch_;  // likewise; behind the demand's
  std::vector<SpanRead> reads_;            // by tag
  std::vector<uint32_t> reads_free_;
  std::vector<Load> loads_;
  std::vector<uint32_t> loads_free_;
  std::vector<int64_t> prefetch_ns_;       // [n_slot] how long the prefetch took that filled it

  std::vector<ExpertCounters> layers_;
  std::vector<PrefetchCounters> prefetch_layers_;
  int64_t stall_ns_ = 0;
  int64_t staging_ns_ = 0;
  uint64_t verified_slots_ = 0;
  uint64_t verified_reads_ = 0;
};

}  // namespace sluice
