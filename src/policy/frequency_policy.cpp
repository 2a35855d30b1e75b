#include "policy/frequency_policy.h"

#include "base/assert.h"

namespace sluice {

FrequencyPolicy::FrequencyPolicy(const PolicyOptions& options)
    : options_(options),
      halving_interval_(options.kind == PolicyKind::kLfu ? options.decay_interval : options.half_life),
      experts_(size_t{options.n_layer} * options.n_expert),
      slots_(options.n_slot),
      heap_(options.n_slot) {
  SLUICE_ASSERT(halving_interval_ >= 1, "a halving interval of 0 forwards");
  SLUICE_ASSERT(experts_.size() < kNowhere, "{} layers of {} experts", options.n_layer, options.n_expert);
}

uint32_t FrequencyPolicy::index_of(ExpertId id) const {
  SLUICE_ASSERT(id.layer < options_.n_layer && id.expert < options_.n_expert, "layer {} expert {}", id.layer,
                id.expert);
  return id.layer * options_.n_expert + id.expert;
}

uint64_t FrequencyPolicy::access_weight() const {
  if (options_.kind == PolicyKind::kLfu) return 1;
  return kUnit + kUnit * forwards_since_halving_ / halving_interval_;
}

void FrequencyPolicy::on_access(ExpertId id) {
  experts_[index_of(id)].score += access_weight();
}

void FrequencyPolicy::release(uint32_t slot, ExpertId id) {
  SLUICE_ASSERT(slot < options_.n_slot && !slots_[slot].evictable, "slot {} of {}", slot, options_.n_slot);
  const uint32_t index = index_of(id);
  Expert& expert = experts_[index];
  SLUICE_ASSERT(expert.slot == kNowhere, "layer {} expert {} in slots {} and {}", id.layer, id.expert, expert.slot,
                slot);
  Slot& state = slots_[slot];
  const Slot before = state;
  expert.slot = slot;
  state = {releases_++, index, true, true};
  if (!before.in_heap) {
    heap_.push(slot, key_of(slot));
  } else if (before.expert != index) {
    heap_.change(slot, key_of(slot));
  }
}

void FrequencyPolicy::acquire(uint32_t slot) {
  SLUICE_ASSERT(slot < options_.n_slot && slots_[slot].evictable, "slot {} of {}", slot, options_.n_slot);
  slots_[slot].evictable = false;
  experts_[slots_[slot].expert].slot = kNowhere;
}

std::optional<uint32_t> FrequencyPolicy::victim() const {
  while (const auto slot = heap_.top()) {
    const SlotHeap::Key key = key_of(*slot);
    if (!slots_[*slot].evictable) {
      heap_.erase(*slot);
      slots_[*slot].in_heap = false;
    } else if (heap_.key(*slot) != key) {
      heap_.change(*slot, key);
    } else {
      return slot;
    }
  }
  return std::nullopt;
}

void FrequencyPolicy::advance() {
  if (++forwards_since_halving_ < halving_interval_) return;
  forwards_since_halving_ = 0;
  for (Expert& expert : experts_) expert.score /= 2;
  heap_.halve_ranks();  // old keys stay below the true ones
}

}  // namespace sluice
