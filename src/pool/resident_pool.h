// The bounded memory that routed experts live in: a fixed set of slots, which expert each holds, who pins it, at what
// generation. Chooses no victim itself (policy/ does) and reads nothing (loader/ does).
//
// Classes  layers whose records have different sizes draw from different size classes. A class is an array of equal
//          slots with an eviction policy of its own; all classes together stay within one byte budget.
// States   empty -> begin_load -> loading -> finish_load -> ready (pinned by the loader) -> unpin -> evictable
//          evictable -> pin -> ready;   evictable -> begin_load of another expert -> loading, generation + 1
//          loading -> fail_load -> empty, generation + 1
// Shapes   slot s of a class starts at s * slot_bytes of that class's memory; slot numbers are global, class by class.
// Units    bytes are uint64_t; slots, layers and experts are indexes.
// Owns     all slot memory until destruction. References stay valid while pinned.
// Errors   begin_load: kNoSlot when every slot of the class is pinned or loading. Misuse (unpinning what is not
//          pinned, a stale SlotRef) asserts.
// Threads  thread-compatible: one caller at a time; loader/ is the thread-safe face.
// Cost     O(1) per call with LRU, O(log n_slot) with LFU; no allocation after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/result.h"
#include "base/types.h"
#include "policy/eviction.h"
#include "pool/slot_memory.h"

namespace sluice {

struct PoolClassSpec {
  uint64_t slot_bytes = 0;
  uint32_t n_slot = 0;
};

struct PoolSpec {
  std::vector<PoolClassSpec> classes;
  std::vector<uint32_t> layer_class;  // by layer number; kNoClass for layers without streamed experts
  uint32_t n_expert = 0;              // expert ids are below this
  PolicyKind policy = PolicyKind::kLfru;
  uint64_t decay_interval = 256;
  // Overwrites a slot the moment its expert is evicted, so that a reader without a pin shows at once.
  bool poison_released_slots = false;

  static constexpr uint32_t kNoClass = UINT32_MAX;
};

class ResidentPool {
 public:
  static Result<std::unique_ptr<ResidentPool>> create(const PoolSpec& spec);

  // The slot that holds `id` or is being filled with it.
  std::optional<SlotRef> find(ExpertId id) const;
  bool is_ready(SlotRef ref) const;

  // Tells the policy that the router asked for `id`, hit or miss.
  void note_access(ExpertId id);
  // Tells the policy that a pass over all layers ended.
  void advance();

  // The caller may read the slot's bytes until unpin. The slot must be ready. Pins count.
  void pin(SlotRef ref);
  void unpin(SlotRef ref);

  // Takes an empty or evictable slot for `id`, which must not be in the pool. The caller writes slot_data, then says
  // finish_load (the slot is ready and pinned once, by the caller) or fail_load (it is empty again).
  Result<SlotRef> begin_load(ExpertId id);
  void finish_load(SlotRef ref);
  void fail_load(SlotRef ref);

  std::byte* slot_data(SlotRef ref) const;
  ExpertId slot_expert(SlotRef ref) const;

  // Calls visit(SlotRef, ExpertId) for every ready slot.
  template <typename Visit>
  void for_each_ready(Visit visit) const {
    for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_[slot].state == State::kReady) visit(SlotRef{slot, slots_[slot].generation}, slots_[slot].expert);
    }
  }

  uint32_t n_slot() const { return static_cast<uint32_t>(slots_.size()); }
  uint64_t bytes() const;
  uint64_t evictions() const { return evictions_; }
  uint64_t evictions(uint32_t layer) const { return layer_evictions_[layer]; }
  uint32_t n_pinned() const { return n_pinned_; }

 private:
  enum class State : uint8_t { kEmpty, kLoading, kReady };
  struct Slot {
    State state = State::kEmpty;
    uint32_t size_class = 0;
    uint32_t pins = 0;
    uint32_t generation = 0;
    ExpertId expert;
  };
  struct Class {
    uint64_t slot_bytes = 0;
    uint32_t first_slot = 0;
    uint32_t n_slot = 0;
    SlotMemory memory;
    std::unique_ptr<EvictionPolicy> policy;
    std::vector<uint32_t> empty;  // global slot numbers; the back is taken next
  };
  static constexpr uint32_t kNoSlotIndex = UINT32_MAX;

  ResidentPool() = default;
  const Slot& checked(SlotRef ref) const;
  Slot& checked(SlotRef ref) { return const_cast<Slot&>(static_cast<const ResidentPool*>(this)->checked(ref)); }
  uint32_t& slot_of(ExpertId id) { return slot_of_[size_t{id.layer} * n_expert_ + id.expert]; }
  Class& class_of(ExpertId id);
  void vacate(uint32_t slot);

  std::vector<Class> classes_;
  std::vector<uint32_t> layer_class_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> slot_of_;  // [layer][expert] -> slot or kNoSlotIndex
  std::vector<uint64_t> layer_evictions_;
  uint32_t n_expert_ = 0;
  uint32_t n_pinned_ = 0;
  uint64_t evictions_ = 0;
  bool poison_ = false;
};

}  // namespace sluice
