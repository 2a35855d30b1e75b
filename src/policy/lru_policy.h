// Least recently used: the slot that was released longest ago goes first. Experts do not matter, only slots. A list
// threaded through two arrays of slot indexes, O(1) per call.
#pragma once

#include <vector>

#include "policy/eviction.h"

namespace sluice {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(const PolicyOptions& options);

  void on_access(ExpertId) override {}
  void release(uint32_t slot, ExpertId id) override;
  void acquire(uint32_t slot) override;
  std::optional<uint32_t> victim() const override;
  void advance() override {}

 private:
  // A ring of links: slot i is link i, and the last link is the list's head, whose next is the oldest slot.
  // A link outside the list points at itself.
  struct Link {
    uint32_t next = 0;
    uint32_t previous = 0;
  };
  uint32_t head() const { return static_cast<uint32_t>(links_.size() - 1); }
  bool evictable(uint32_t slot) const { return links_[slot].next != slot; }

  std::vector<Link> links_;  // [n_slot + 1]
};

}  // namespace sluice
