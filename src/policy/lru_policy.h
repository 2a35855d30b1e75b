// Least recently used: the slot that was released longest ago goes first. Experts do not matter, only slots. O(1) per
// call.
#pragma once

#include "policy/eviction.h"
#include "policy/slot_list.h"

namespace sluice {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(const PolicyOptions& options) : evictable_(options.n_slot) {}

  void on_access(ExpertId) override {}
  void release(uint32_t slot, ExpertId) override { evictable_.push(slot); }
  void acquire(uint32_t slot) override { evictable_.erase(slot); }
  std::optional<uint32_t> victim() const override { return evictable_.oldest(); }
  void advance() override {}

 private:
  SlotList evictable_;
};

}  // namespace sluice
