// LFU and LFRU: the expert with the lowest score goes first, among equal scores the slot that was released longest ago.
// Every expert has a score whether it is resident or not, so one that comes back is judged by its whole past.
//
//   LFU    an access adds 1; every decay_interval forwards all scores are halved, rounded down.
//   LFRU   an access that is t forwards old counts w(t), which halves every H = half_life forwards: the score is
//          sum of w(now - t_i) over all accesses i. This is the combined recency and frequency value of LRFU (Lee et
//          al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
//          policies", IEEE Transactions on Computers 50(12), 2001) with lambda = 1 / H: H = infinity is LFU, H -> 0 is
//          LRU. Computed without clocks and powers: within a period of H forwards the weight of a new access grows in
//          a straight line from 1 to 2, then all scores are halved and the weight starts at 1 again. In fixed point,
//             an access adds kUnit + kUnit * (forward mod H) / H;   every H forwards all scores are halved.
//          The straight line instead of 2^x is off by at most 6.2 %, and the same on every machine.
//
// Lazy     A key only grows while its expert stays: its score at each access, its place among equals at each release.
// So
//          the heap keeps old keys, and pinned slots too; a victim is looked for by correcting what stands at the top
//          until that is right. A hit then changes no heap.
// Cost     hits O(1); a victim O(log n_slot) amortised over the accesses since the last one; every halving
//          O(n_layer * n_expert + n_slot).
#pragma once

#include <vector>

#include "policy/eviction.h"
#include "policy/slot_heap.h"

namespace sluice {

class FrequencyPolicy final : public EvictionPolicy {
 public:
  // options.kind is kLfu or kLfru.
  explicit FrequencyPolicy(const PolicyOptions& options);

  void on_access(ExpertId id) override;
  void release(uint32_t slot, ExpertId id) override;
  void acquire(uint32_t slot) override;
  std::optional<uint32_t> victim() const override;
  void advance() override;

 private:
  static constexpr uint32_t kNowhere = UINT32_MAX;
  // Fine enough for an expert to keep a score for 20 half-lives after its last access.
  static constexpr uint64_t kUnit = uint64_t{1} << 20;

  struct Expert {
    uint64_t score = 0;
    uint32_t slot = kNowhere;  // the evictable one that holds it
  };
  struct Slot {
    uint64_t released = 0;  // number of its last release
    uint32_t expert = 0;    // index of the expert of its last release
    bool evictable = false;
    bool in_heap = false;
  };

  uint32_t index_of(ExpertId id) const;
  uint64_t access_weight() const;
  SlotHeap::Key key_of(uint32_t slot) const { return {experts_[slots_[slot].expert].score, slots_[slot].released}; }

  const PolicyOptions options_;
  const uint64_t halving_interval_;
  uint64_t forwards_since_halving_ = 0;
  uint64_t releases_ = 0;
  std::vector<Expert> experts_;      // [n_layer * n_expert]
  mutable std::vector<Slot> slots_;  // [n_slot]; looking for a victim may change `in_heap`
  // All evictable slots and some others, under keys that are not above key_of(slot).
  mutable SlotHeap heap_;
};

}  // namespace sluice
