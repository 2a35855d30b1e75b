#include "policy/frequency_policy.h"

#include "base/assert.h"

namespace sluice {

FrequencyPolicy::FrequencyPolicy(const PolicyOptions& options)
    : options_(options),
      halving_interval_(options.kind == PolicyKind::kLfu ? options.decay_interval : options.half_life),
      scores_(size_t{options.n_layer} * options.n_expert, 0),
      slot_of_(scores_.size(), kNowhere),
      expert_of_(options.n_slot, 0),
      evictable_(options.n_slot) {
  SLUICE_ASSERT(halving_interval_ >= 1, "a halving interval of 0 forwards");
}

size_t FrequencyPolicy::index_of(ExpertId id) const {
  SLUICE_ASSERT(id.layer < options_.n_layer && id.expert < options_.n_expert, "layer {} expert {}", id.layer,
                id.expert);
  return size_t{id.layer} * options_.n_expert + id.expert;
}

uint64_t FrequencyPolicy::access_weight() const {
  if (options_.kind == PolicyKind::kLfu) return 1;
  return kUnit + kUnit * forwards_since_halving_ / halving_interval_;
}

void FrequencyPolicy::on_access(ExpertId id) {
  const size_t index = index_of(id);
  scores_[index] += access_weight();
  const uint32_t slot = slot_of_[index];
  if (slot != kNowhere) evictable_.change(slot, {scores_[index], evictable_.key(slot).order});
}

void FrequencyPolicy::release(uint32_t slot, ExpertId id) {
  const size_t index = index_of(id);
  SLUICE_ASSERT(slot < options_.n_slot && !evictable_.contains(slot), "slot {} of {}", slot, options_.n_slot);
  SLUICE_ASSERT(slot_of_[index] == kNowhere, "layer {} expert {} in slots {} and {}", id.layer, id.expert,
                slot_of_[index], slot);
  slot_of_[index] = slot;
  expert_of_[slot] = index;
  evictable_.push(slot, {scores_[index], releases_++});
}

void FrequencyPolicy::acquire(uint32_t slot) {
  SLUICE_ASSERT(slot < options_.n_slot && evictable_.contains(slot), "slot {} of {}", slot, options_.n_slot);
  evictable_.erase(slot);
  slot_of_[expert_of_[slot]] = kNowhere;
}

std::optional<uint32_t> FrequencyPolicy::victim() const {
  return evictable_.top();
}

void FrequencyPolicy::advance() {
  if (++forwards_since_halving_ < halving_interval_) return;
  forwards_since_halving_ = 0;
  for (uint64_t& score : scores_) score /= 2;
  evictable_.rank_again([this](uint32_t slot) { return scores_[expert_of_[slot]]; });
}

}  // namespace sluice
