// Slots in the order in which they came: a list threaded through an array, so that any slot joins, leaves and is found
// in O(1) without allocation.
//
// Shapes   slots are indexes below the n_slot given at construction; a slot is in the list at most once.
// Misuse   push of a slot that is inside, erase of one that is not: assert.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/assert.h"

namespace sluice {

class SlotList {
 public:
  explicit SlotList(uint32_t n_slot) : links_(size_t{n_slot} + 1) {
    for (uint32_t i = 0; i < links_.size(); i++) links_[i] = {i, i};
  }

  bool contains(uint32_t slot) const { return links_[slot].next != slot; }
  std::optional<uint32_t> oldest() const {
    const uint32_t first = links_[head()].next;
    return first == head() ? std::nullopt : std::optional<uint32_t>(first);
  }

  void push(uint32_t slot) {
    SLUICE_ASSERT(slot < head() && !contains(slot), "slot {} of {}", slot, head());
    const uint32_t newest = links_[head()].previous;
    links_[slot] = {head(), newest};
    links_[newest].next = slot;
    links_[head()].previous = slot;
  }

  void erase(uint32_t slot) {
    SLUICE_ASSERT(slot < head() && contains(slot), "slot {} of {}", slot, head());
    links_[links_[slot].previous].next = links_[slot].next;
    links_[links_[slot].next].previous = links_[slot].previous;
    links_[slot] = {slot, slot};
  }

 private:
  // A ring of links: slot i is link i, and the last link is the list's head, whose next is the oldest slot.
  // A link outside the list points at itself.
  struct Link {
    uint32_t next = 0;
    uint32_t previous = 0;
  };
  uint32_t head() const { return static_cast<uint32_t>(links_.size() - 1); }

  std::vector<Link> links_;  // [n_slot + 1]
};

}  // namespace sluice
