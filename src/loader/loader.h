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
// Units    time in ns; bytes.
// Owns     pool, staging, device.
// Errors   create: kNoMemory for a budget below the smallest; kBadArgument for verify_reads without checksums.
//          start: kBadArgument for an expert id outside the layer (nothing is read then). next: the first read error;
//          the failed slot is empty again, the demand is over, other demands go on. A file that was changed is noticed
//          before anything is read, then what is resident stays usable; or after the reads, then nothing does.
// Threads  one Demand at a time: the caller holds the model's lock while it lives. Threads exist only inside the device.
// Cost     no allocation in a steady state: all lists keep their capacity.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
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

  // Compares every ready slot with the file: slots that differ, and a line for the first dozen.
  Result<uint64_t> verify_all_slots();

  bool streams_layer(uint32_t layer) const { return layer < source_of_layer_.size() && source_of_layer_[layer] != kNone; }
  const SlotPlan& plan() const { return plan_; }
  const ResidentPool& pool() const { return *pool_; }
  // That is in effect: another than was asked for when a pool is too small for it.
  PolicyKind policy() const { return policy_; }
  // Adds this loader's counters to `stats`.
  void add_stats(EngineStats& stats) const;
  int64_t stall_ns() const { return stall_ns_; }      // waiting for reads
  int64_t staging_ns() const { return staging_ns_; }  // copying from staging buffers

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  struct Entry {  // one expert of the current demand
    uint32_t expert = 0;
    SlotRef slot;
    uint32_t reads_left = 0;
    enum class State : uint8_t { kUnplaced, kLoading, kReady, kHanded, kReleased } state = State::kUnplaced;
  };
  struct SpanRead {  // one span of one entry, waiting for a staging buffer or in flight
    uint32_t entry = 0;
    uint32_t span = 0;
    uint32_t staging = kNone;
  };

  Loader() = default;
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
  Status compare_read(const Entry& entry, uint32_t span);

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
  std::deque<SpanRead> waiting_;        // for a staging buffer
  std::vector<SpanRead> reads_;         // by tag
  std::vector<ReadCompletion> completions_;
  std::vector<std::byte> verify_buffer_;

  std::vector<ExpertCounters> layers_;
  int64_t stall_ns_ = 0;
  int64_t staging_ns_ = 0;
  uint64_t verified_slots_ = 0;
  uint64_t verified_reads_ = 0;
};

}  // namespace sluice
