#include "policy/lru_policy.h"

#include "base/assert.h"

namespace sluice {

LruPolicy::LruPolicy(const PolicyOptions& options) : links_(size_t{options.n_slot} + 1) {
  for (uint32_t i = 0; i < links_.size(); i++) links_[i] = {i, i};
}

void LruPolicy::release(uint32_t slot, ExpertId) {
  SLUICE_ASSERT(slot < head() && !evictable(slot), "slot {} of {}", slot, head());
  const uint32_t newest = links_[head()].previous;
  links_[slot] = {head(), newest};
  links_[newest].next = slot;
  links_[head()].previous = slot;
}

void LruPolicy::acquire(uint32_t slot) {
  SLUICE_ASSERT(slot < head() && evictable(slot), "slot {} of {}", slot, head());
  links_[links_[slot].previous].next = links_[slot].next;
  links_[links_[slot].next].previous = links_[slot].previous;
  links_[slot] = {slot, slot};
}

std::optional<uint32_t> LruPolicy::victim() const {
  const uint32_t oldest = links_[head()].next;
  return oldest == head() ? std::nullopt : std::optional<uint32_t>(oldest);
}

}  // namespace sluice
