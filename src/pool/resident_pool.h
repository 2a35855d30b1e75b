// The bounded memory that routed experts live in: a fixed set of slots, which expert each holds, who pins it, at what
// generation. Chooses no victim itself (policy/ does) and reads nothing (loader/ does).
//
// Classes  layers whose records have different sizes draw from different size classes. A class is an array of equal
//          slots with an eviction policy of its own; all classes together stay within one byte budget. A class for each
//          layer makes a budget per layer; one class for all makes a shared one. n_slot_min of a class is its floor:
//          so many slots stay whatever the side region or a smaller budget take, enough for one layer's call.
// States   empty -> begin_load -> loading -> finish_load -> ready (pinned by the loader) -> unpin -> evictable
//          evictable -> pin -> ready;   evictable -> begin_load of another expert -> loading, generation + 1
//          loading -> fail_load -> empty, generation + 1
//          empty or evictable -> resize -> lent (its memory is the system's) -> resize -> empty
// Side     speculative loads fill slots of the same array that count as the side region: no policy sees them, and each
//          class has at most n_side of them for each generation.
//            begin_speculative_load takes an empty slot or the policy's victim -> loading -> finish_load -> readable
//            readable or loading -> promote -> an ordinary slot; no byte moves, only the count changes, and the next
//            speculative load takes another slot in exchange
//          Two generations: what is filled in one forward stays readable until the next forward has ended. Then the
//          slots that nobody promoted expire; the forward after it fills them. So a fill never overwrites a slot that
//          could be read in the same forward, also by a reader without a pin (a copy or kernel that is only enqueued).
//          One generation: a fill replaces the oldest readable slot when the quota is used up, in the same forward
//          too; the caller must have drained all readers without a pin before.
//          A slot that is still being filled is not readable: whoever needs it waits for finish_load (drains) first.
// Pins     count, and may be dropped much later by another party (for a stream, when its event has fired). A pinned
//          slot is never a victim, never expires, is never lent, in either mode.
// Shapes   slot s of a class starts at s * slot_bytes of that class's memory; slot numbers are global, class by class,
//          and stay the same over resize.
// Units    bytes are uint64_t; slots, layers and experts are indexes; a forward is one pass over the layers (advance).
// Owns     all slot memory until destruction. References stay valid while pinned.
// Errors   begin_load: kNoSlot with numbers when every slot of the class is pinned, loading or in the side region;
//          begin_speculative_load also when its generation is full. create: kBadArgument for a class too small for its
//          floor and side region. Misuse (unpinning what is not pinned, a stale SlotRef) asserts.
// Threads  thread-compatible: one caller at a time; loader/ is the thread-safe face. Pinned bytes may be read, and
//          loading slots written, from any thread meanwhile.
// Cost     O(1) per call apart from the policy's (policy/eviction.h), resize O(1) amortised for each slot that it
// moves;
//          nothing is allocated after construction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/types.h"
#include "policy/eviction.h"
#include "policy/slot_list.h"
#include "pool/slot_memory.h"

namespace sluice {

struct PoolClassSpec {
  uint64_t slot_bytes = 0;
  uint32_t n_slot = 0;
  uint32_t n_slot_min = 1;  // the floor
  uint32_t n_side = 0;      // most slots of one generation of the side region
};

struct PoolSpec {
  std::vector<PoolClassSpec> classes;
  std::vector<uint32_t> layer_class;  // by layer number; kNoClass for layers without streamed experts
  uint32_t n_expert = 0;              // expert ids are below this
  PolicyKind policy = PolicyKind::kLfru;
  uint64_t decay_interval = 256;
  uint32_t side_generations = 2;  // 1 or 2
  MemoryOptions memory;
  // Overwrites a slot the moment its expert is evicted, so that a reader without a pin shows at once.
  bool poison_released_slots = false;

  static constexpr uint32_t kNoClass = UINT32_MAX;
};

// Of the side region, since the start.
struct SideCounts {
  uint64_t loads = 0;     // finished fills, without those that were promoted before
  uint64_t promoted = 0;  // of all that were begun
  uint64_t expired = 0;   // filled for nothing
};

class ResidentPool {
 public:
  static Result<std::unique_ptr<ResidentPool>> create(const PoolSpec& spec);

  // The slot that holds `id` or is being filled with it, speculatively or not.
  std::optional<SlotRef> find(ExpertId id) const;
  bool is_ready(SlotRef ref) const;
  bool is_speculative(SlotRef ref) const;

  // Tells the policy that the router asked for `id`, hit or miss.
  void note_access(ExpertId id);
  // A pass over all layers ended: tells the policy, and changes the generation of the side region.
  void advance();

  // The caller may read the slot's bytes until unpin. The slot must be ready. Pins count.
  void pin(SlotRef ref);
  void unpin(SlotRef ref);

  // Takes an empty or evictable slot for `id`, which must not be in the pool. The caller writes slot_data, then says
  // finish_load (the slot is ready and pinned once, by the caller) or fail_load (it is empty again).
  Result<SlotRef> begin_load(ExpertId id);
  // As begin_load, for a slot of the side region: finish_load leaves it unpinned and readable, or empty when its
  // generation has expired meanwhile.
  Result<SlotRef> begin_speculative_load(ExpertId id);
  void finish_load(SlotRef ref);
  void fail_load(SlotRef ref);
  // The expert is needed. A readable slot becomes ready and pinned once, by the caller; one that is still being filled
  // goes on as a demand load.
  void promote(SlotRef ref);

  // Shares `bytes` out to the classes, never less than their floors and side regions, never more than they were created
  // with. Experts are evicted and their memory is given back until that is reached; what pinned and loading slots
  // withhold follows as soon as they are released. Changes no contents of slots that stay.
  void resize(uint64_t bytes);

  std::byte* slot_data(SlotRef ref) const;
  ExpertId slot_expert(SlotRef ref) const;

  // Calls visit(SlotRef, ExpertId) for every slot whose bytes may be read.
  template <typename Visit>
  void for_each_ready(Visit visit) const {
    for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_[slot].state == State::kReady) visit(SlotRef{slot, slots_[slot].generation}, slots_[slot].id());
    }
  }

  uint32_t n_slot() const { return static_cast<uint32_t>(slots_.size()); }
  uint64_t bytes() const;         // of all slots, lent ones included
  uint64_t usable_bytes() const;  // of slots that are not lent
  uint64_t bytes_min() const;     // what resize can reach at least
  uint64_t evictions() const { return evictions_; }
  uint64_t evictions(uint32_t layer) const { return layer_evictions_[layer]; }
  uint32_t n_pinned() const { return n_pinned_; }
  const SideCounts& side_counts() const { return side_counts_; }
  // What was wished for the memory and could not be had, one line each.
  const std::vector<std::string>& memory_missing() const { return memory_missing_; }

 private:
  enum class State : uint8_t { kEmpty, kLoading, kReady, kLent };
  // Small: a hit touches it at random, and four of them share a cache line.
  struct Slot {
    uint16_t layer = 0;
    uint16_t expert = 0;
    uint32_t generation = 0;
    uint16_t pins = 0;
    uint16_t size_class = 0;
    State state = State::kEmpty;
    bool speculative = false;

    ExpertId id() const { return {layer, expert}; }
  };
  static_assert(sizeof(Slot) == 16);
  struct Class {
    uint64_t slot_bytes = 0;
    uint32_t first_slot = 0;
    uint32_t n_slot = 0;
    uint32_t n_slot_min = 0;
    uint32_t n_side = 0;
    uint32_t n_usable = 0;  // not lent
    uint32_t n_target = 0;  // what n_usable shall be
    uint32_t n_pinned = 0;
    uint32_t n_loading = 0;
    std::array<uint32_t, 2> side_count = {};  // by generation; loading and pinned ones included
    std::vector<SlotList> side;               // by generation: readable and unpinned, oldest first; class's own numbers
    SlotMemory memory;
    std::unique_ptr<EvictionPolicy> policy;
    std::vector<uint32_t> empty;  // global slot numbers; the back is taken next
    std::vector<uint32_t> lent;   // likewise
  };
  struct Layer {
    uint32_t size_class = PoolSpec::kNoClass;
    uint32_t index = 0;  // among the layers of its class: the policy's layer number
  };
  static constexpr uint32_t kNoSlotIndex = UINT32_MAX;

  ResidentPool() = default;
  const Slot& checked(SlotRef ref) const;
  Slot& checked(SlotRef ref) { return const_cast<Slot&>(static_cast<const ResidentPool*>(this)->checked(ref)); }
  uint32_t& slot_of(ExpertId id) { return slot_of_[size_t{id.layer} * n_expert_ + id.expert]; }
  Class& class_of(ExpertId id);
  ExpertId policy_id(ExpertId id) const { return {layers_[id.layer].index, id.expert}; }
  uint32_t floor_of(const Class& size_class) const;
  // Of a speculative slot: the generation of the side region it counts for, and whether that is over.
  uint32_t generation_of(uint32_t slot) const { return filled_in_[slot] % side_generations_; }
  bool has_expired(uint32_t slot) const {
    return side_generations_ == 2 && forward_ - filled_in_[slot] >= side_generations_;
  }
  uint32_t take_slot(Class& size_class);
  Result<SlotRef> begin(ExpertId id, Class& size_class, bool speculative);
  Error no_slot(ExpertId id, const Class& size_class) const;
  void evict(Class& size_class, uint32_t slot);
  void leave_side(uint32_t slot);
  void expire(uint32_t slot);
  void vacate(uint32_t slot);
  void settle_size(Class& size_class);
  void lend(Class& size_class, uint32_t slot);
  void take_back(Class& size_class, uint32_t slot);

  std::vector<Class> classes_;
  std::vector<Layer> layers_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> filled_in_;  // [n_slot] the forward that began the slot's load
  std::vector<uint32_t> slot_of_;    // [layer][expert] -> slot or kNoSlotIndex
  std::vector<uint64_t> layer_evictions_;
  std::vector<std::string> memory_missing_;
  uint32_t n_expert_ = 0;
  uint32_t n_pinned_ = 0;
  uint32_t side_generations_ = 2;
  uint32_t forward_ = 0;
  uint64_t evictions_ = 0;
  SideCounts side_counts_;
  bool poison_ = false;
};

}  // namespace sluice
