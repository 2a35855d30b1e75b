// S3-FIFO: new experts pass through a small queue and reach the main queue only when they were asked for again; most
// that are used once leave early. Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction",
// SOSP 2023.
//
// Queues   small   10 % of the slots (at least 1): where loaded experts enter, unless the ghost list knows them
//          main    the rest
//          ghost   the last (n_slot - small) experts that left from the small queue, without their bytes; an expert
//                  that is loaded again while it is in there enters the main queue
// Use      a slot counts the accesses since it entered its queue, up to 3; the access that caused the load does not
//          count. Evicting: while the small queue has its share or more, its oldest expert moves to the main queue
//          (count 0) if it was used more than once, else it goes. Otherwise the main queue's oldest goes if its count
//          is 0, else it moves to the main queue's end with a count lower by one. Nothing moves before an eviction.
// Pins     an acquired slot keeps its place, queue and count; it is passed over while an eviction looks for its victim,
//          and is where it was when it is released with the same expert. acquire() after on_access() of the slot's
//          expert is such a pin; acquire() without it is the eviction, which is taken back should the slot be released
//          with the same expert after all.
//
// Lazy     A queue is two heaps, in which pinned slots stay, under keys that are not above their true ones (a count
// only
//          grows while a slot keeps its place). Whoever looks at a top corrects it first, so a hit changes no heap.
//
// Cost     hits O(1); a victim O(log n_slot), amortised over the accesses since the last one and the counts they gave.
#pragma once

#include <vector>

#include "policy/eviction.h"
#include "policy/slot_heap.h"

namespace sluice {

class S3FifoPolicy final : public EvictionPolicy {
 public:
  explicit S3FifoPolicy(const PolicyOptions& options);

  void on_access(ExpertId id) override;
  void release(uint32_t slot, ExpertId id) override;
  void acquire(uint32_t slot) override;
  std::optional<uint32_t> victim() const override;
  void advance() override {}

 private:
  static constexpr uint32_t kNowhere = UINT32_MAX;
  static constexpr size_t kNoExpert = SIZE_MAX;
  static constexpr uint32_t kUsesMax = 3;
  static constexpr uint32_t kUsesToPromote = 2;

  // The evictable slots of one FIFO queue, and some pinned ones, in two orders.
  struct Queue {
    explicit Queue(uint32_t n_slot) : by_age(n_slot), by_choice(n_slot) {}
    SlotHeap by_age;     // by ticket
    SlotHeap by_choice;  // by what keeps the slot from leaving, then by ticket
  };
  struct Slot {
    size_t expert = kNoExpert;  // index of the expert of the last release
    uint64_t ticket = 0;        // place in its queue: smaller is older
    uint32_t uses = 0;          // accesses since it entered the queue, up to kUsesMax
    bool in_main = false;
    bool evictable = false;
    bool requested = false;  // on_access since the last release
    bool gone = false;       // acquired by an eviction
    bool queued = false;     // in both heaps of its queue
  };

  size_t index_of(ExpertId id) const;
  bool small_is_due() const;
  bool in_ghost(size_t expert) const;
  void enter(uint32_t slot, bool in_main);
  std::optional<uint32_t> oldest(Queue& queue) const;
  std::optional<uint32_t> first_choice(Queue& queue) const;
  SlotHeap::Key choice_key(const Slot& slot) const;
  void queue(uint32_t slot);
  void unqueue(uint32_t slot) const;
  void requeue_to_main(uint32_t slot, uint32_t uses);
  void pass_over_all_before(uint32_t slot);

  const PolicyOptions options_;
  const uint32_t small_target_;
  const uint64_t ghost_capacity_;
  mutable std::vector<Slot> slots_;     // [n_slot]; looking for a victim may change `queued`
  std::vector<uint32_t> slot_of_;       // [n_layer * n_expert] the slot of its last release that is not gone
  std::vector<uint64_t> ghost_number_;  // [n_layer * n_expert] number of its last entry into the ghost list, 0 for none
  uint64_t ghost_entries_ = 0;
  uint64_t tickets_ = 0;
  uint32_t small_count_ = 0;  // slots in the small queue, pinned ones included
  mutable Queue small_;
  mutable Queue main_;
};

}  // namespace sluice
