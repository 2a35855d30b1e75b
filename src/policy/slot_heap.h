// Evictable slots ordered by a key: the smallest is found in O(1), any slot leaves or changes its key in O(log n). A
// binary heap that knows where each slot stands in it. Smaller keys leave first.
//
// Shapes   slots are indexes below the n_slot given at construction; a slot is in the heap at most once.
// Misuse   push of a slot that is inside, key or erase of one that is not: assert.
// Cost     no allocation after construction.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace sluice {

class SlotHeap {
 public:
  struct Key {
    uint64_t rank = 0;
    uint64_t order = 0;  // among equal ranks
    auto operator<=>(const Key&) const = default;
  };

  explicit SlotHeap(uint32_t n_slot) : place_(n_slot, kOutside) { entries_.reserve(n_slot); }

  bool empty() const { return entries_.empty(); }
  bool contains(uint32_t slot) const { return place_[slot] != kOutside; }
  std::optional<uint32_t> top() const {
    return entries_.empty() ? std::nullopt : std::optional<uint32_t>(entries_[0].slot);
  }
  const Key& key(uint32_t slot) const {
    SLUICE_ASSERT(contains(slot), "slot {}", slot);
    return entries_[place_[slot]].key;
  }

  void push(uint32_t slot, Key key) {
    SLUICE_ASSERT(!contains(slot), "slot {}", slot);
    entries_.push_back({key, slot});
    place_[slot] = static_cast<uint32_t>(entries_.size() - 1);
    rise(place_[slot]);
  }

  void erase(uint32_t slot) {
    SLUICE_ASSERT(contains(slot), "slot {}", slot);
    const uint32_t hole = place_[slot];
    place_[slot] = kOutside;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (last.slot != slot) settle(hole, last);
  }

  void change(uint32_t slot, Key key) {
    SLUICE_ASSERT(contains(slot), "slot {}", slot);
    settle(place_[slot], {key, slot});
  }

  // Halves every rank, rounded down: what was not above stays so, but new ties may fall out otherwise. O(n).
  void halve_ranks() {
    for (Entry& entry : entries_) entry.key.rank /= 2;
    for (size_t i = entries_.size() / 2; i-- > 0;) sink(static_cast<uint32_t>(i));
  }

 private:
  static constexpr uint32_t kOutside = UINT32_MAX;
  struct Entry {
    Key key;
    uint32_t slot = 0;
  };

  void settle(uint32_t at, const Entry& entry) {
    entries_[at] = entry;
    place_[entry.slot] = at;
    rise(at);
    sink(place_[entry.slot]);
  }

  void swap(uint32_t a, uint32_t b) {
    std::swap(entries_[a], entries_[b]);
    place_[entries_[a].slot] = a;
    place_[entries_[b].slot] = b;
  }

  void rise(uint32_t at) {
    while (at > 0) {
      const uint32_t parent = (at - 1) / 2;
      if (entries_[parent].key <= entries_[at].key) return;
      swap(at, parent);
      at = parent;
    }
  }

  void sink(uint32_t at) {
    const auto n = static_cast<uint32_t>(entries_.size());
    while (true) {
      const uint32_t left = 2 * at + 1;
      if (left >= n) return;
      const uint32_t right = left + 1;
      const uint32_t child = right < n && entries_[right].key < entries_[left].key ? right : left;
      if (entries_[at].key <= entries_[child].key) return;
      swap(at, child);
      at = child;
    }
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> place_;  // [n_slot] index into entries_, or kOutside
};

}  // namespace sluice
