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
// Cost     O(log n_slot) per call; every halving O(n_layer * n_expert + n_slot).
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

  size_t index_of(ExpertId id) const;
  uint64_t access_weight() const;

  const PolicyOptions options_;
  const uint64_t halving_interval_;
  uint64_t forwards_since_halving_ = 0;
  uint64_t releases_ = 0;
  std::vector<uint64_t> scores_;   // [n_layer * n_expert]
  std::vector<uint32_t> slot_of_;  // [n_layer * n_expert] the evictable slot that holds it, or kNowhere
  std::vector<size_t> expert_of_;  // [n_slot] index of the expert held; meaningful while evictable
  SlotHeap evictable_;             // rank: score, order: number of the release
};

}  // namespace sluice
