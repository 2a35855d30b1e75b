#include "policy/s3fifo_policy.h"

#include <algorithm>

#include "base/assert.h"

namespace sluice {

S3FifoPolicy::S3FifoPolicy(const PolicyOptions& options)
    : options_(options),
      small_target_(std::max(options.n_slot / 10, 1U)),
      ghost_capacity_(options.n_slot - std::min(small_target_, options.n_slot)),
      slots_(options.n_slot),
      slot_of_(size_t{options.n_layer} * options.n_expert, kNowhere),
      ghost_number_(slot_of_.size(), 0),
      small_(options.n_slot),
      main_(options.n_slot) {}

size_t S3FifoPolicy::index_of(ExpertId id) const {
  SLUICE_ASSERT(id.layer < options_.n_layer && id.expert < options_.n_expert, "layer {} expert {}", id.layer,
                id.expert);
  return size_t{id.layer} * options_.n_expert + id.expert;
}

bool S3FifoPolicy::small_is_due() const {
  return small_count_ >= small_target_ || !oldest(main_);
}

bool S3FifoPolicy::in_ghost(size_t expert) const {
  return ghost_number_[expert] != 0 && ghost_number_[expert] + ghost_capacity_ > ghost_entries_;
}

void S3FifoPolicy::on_access(ExpertId id) {
  const uint32_t slot = slot_of_[index_of(id)];
  if (slot == kNowhere) return;
  Slot& state = slots_[slot];
  state.requested = true;
  if (state.uses < kUsesMax) state.uses++;
}

void S3FifoPolicy::release(uint32_t slot, ExpertId id) {
  const size_t expert = index_of(id);
  SLUICE_ASSERT(slot < options_.n_slot && !slots_[slot].evictable, "slot {} of {}", slot, options_.n_slot);
  Slot& state = slots_[slot];
  SLUICE_ASSERT(slot_of_[expert] == kNowhere || slot_of_[expert] == slot || !slots_[slot_of_[expert]].evictable,
                "layer {} expert {} in slots {} and {}", id.layer, id.expert, slot_of_[expert], slot);
  if (state.expert == expert) {
    if (state.gone) {
      ghost_number_[expert] = 0;
      if (!state.in_main) small_count_++;
    }
  } else {
    if (state.queued) unqueue(slot);
    if (state.expert != kNoExpert && !state.gone) {  // its expert was dropped without an eviction
      if (!state.in_main) small_count_--;
      if (slot_of_[state.expert] == slot) slot_of_[state.expert] = kNowhere;
    }
    state.expert = expert;
    enter(slot, in_ghost(expert));
    ghost_number_[expert] = 0;
  }
  slot_of_[expert] = slot;
  state.gone = false;
  state.requested = false;
  state.evictable = true;
  if (!state.queued) queue(slot);
}

void S3FifoPolicy::acquire(uint32_t slot) {
  SLUICE_ASSERT(slot < options_.n_slot && slots_[slot].evictable, "slot {} of {}", slot, options_.n_slot);
  Slot& state = slots_[slot];
  if (!state.requested) {
    if (victim() == slot) pass_over_all_before(slot);
    if (state.queued) unqueue(slot);
    state.gone = true;
    slot_of_[state.expert] = kNowhere;
    if (!state.in_main) {
      small_count_--;
      ghost_number_[state.expert] = ++ghost_entries_;
    }
  }
  state.evictable = false;
}

// What pass_over_all_before() would stop at, without moving anything. Experts of the small queue that were used enter
// the main queue with count 0, behind those that are there: so a main expert with count 0 goes before them, and they go
// before a main expert with a higher count, whose turn comes after it was moved behind them.
std::optional<uint32_t> S3FifoPolicy::victim() const {
  const auto from_small = small_is_due() ? first_choice(small_) : std::nullopt;
  const auto from_main = first_choice(main_);
  if (from_small && slots_[*from_small].uses < kUsesToPromote) return from_small;
  if (from_main && slots_[*from_main].uses == 0) return from_main;
  return from_small ? from_small : from_main;
}

// The eviction itself up to its victim, which stays in its queue.
void S3FifoPolicy::pass_over_all_before(uint32_t victim) {
  if (small_is_due()) {
    while (const auto slot = oldest(small_)) {
      if (slots_[*slot].uses < kUsesToPromote) {
        SLUICE_ASSERT(*slot == victim, "slot {}, expected {}", *slot, victim);
        return;
      }
      small_count_--;
      requeue_to_main(*slot, 0);
    }
  }
  while (const auto slot = oldest(main_)) {
    if (slots_[*slot].uses == 0) {
      SLUICE_ASSERT(*slot == victim, "slot {}, expected {}", *slot, victim);
      return;
    }
    requeue_to_main(*slot, slots_[*slot].uses - 1);
  }
}

// Puts a slot at the end of a queue, with nothing counted yet; it is queued when it is evictable.
void S3FifoPolicy::enter(uint32_t slot, bool in_main) {
  slots_[slot].in_main = in_main;
  slots_[slot].ticket = ++tickets_;
  slots_[slot].uses = 0;
  if (!in_main) small_count_++;
}

void S3FifoPolicy::requeue_to_main(uint32_t slot, uint32_t uses) {
  unqueue(slot);
  enter(slot, true);
  slots_[slot].uses = uses;
  queue(slot);
}

SlotHeap::Key S3FifoPolicy::choice_key(const Slot& slot) const {
  const uint64_t keeps = slot.in_main ? slot.uses : (slot.uses >= kUsesToPromote ? 1 : 0);
  return {keeps, slot.ticket};
}

void S3FifoPolicy::queue(uint32_t slot) {
  Slot& state = slots_[slot];
  Queue& queue = state.in_main ? main_ : small_;
  queue.by_age.push(slot, {state.ticket, 0});
  queue.by_choice.push(slot, choice_key(state));
  state.queued = true;
}

void S3FifoPolicy::unqueue(uint32_t slot) const {
  Slot& state = slots_[slot];
  Queue& queue = state.in_main ? main_ : small_;
  queue.by_age.erase(slot);
  queue.by_choice.erase(slot);
  state.queued = false;
}

// The evictable slot that entered first.
std::optional<uint32_t> S3FifoPolicy::oldest(Queue& queue) const {
  while (const auto slot = queue.by_age.top()) {
    if (slots_[*slot].evictable) return slot;
    unqueue(*slot);
  }
  return std::nullopt;
}

// The evictable slot that has least to keep it.
std::optional<uint32_t> S3FifoPolicy::first_choice(Queue& queue) const {
  while (const auto slot = queue.by_choice.top()) {
    const SlotHeap::Key key = choice_key(slots_[*slot]);
    if (!slots_[*slot].evictable) {
      unqueue(*slot);
    } else if (queue.by_choice.key(*slot) != key) {
      queue.by_choice.change(*slot, key);
    } else {
      return slot;
    }
  }
  return std::nullopt;
}

}  // namespace sluice
