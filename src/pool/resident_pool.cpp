#include "pool/resident_pool.h"

#include <cstring>

#include "base/bytes.h"

namespace sluice {

namespace {

constexpr int kPoison = 0xa5;

}  // namespace

Result<std::unique_ptr<ResidentPool>> ResidentPool::create(const PoolSpec& spec) {
  std::unique_ptr<ResidentPool> pool(new ResidentPool);
  pool->layer_class_ = spec.layer_class;
  pool->n_expert_ = spec.n_expert;
  pool->poison_ = spec.poison_released_slots;
  const uint32_t n_layer = static_cast<uint32_t>(spec.layer_class.size());
  pool->slot_of_.assign(size_t{n_layer} * spec.n_expert, kNoSlotIndex);
  pool->layer_evictions_.assign(n_layer, 0);
  for (const PoolClassSpec& class_spec : spec.classes) {
    Class size_class;
    size_class.slot_bytes = class_spec.slot_bytes;
    size_class.first_slot = pool->n_slot();
    size_class.n_slot = class_spec.n_slot;
    const auto bytes = checked_mul(class_spec.slot_bytes, class_spec.n_slot);
    if (!bytes) return make_error(ErrorCode::kNoMemory, "pool: {} slots of {} overflow", class_spec.n_slot, class_spec.slot_bytes);
    auto memory = SlotMemory::create(*bytes);
    if (!memory) return memory.error();
    size_class.memory = std::move(memory).value();
    size_class.policy = make_policy({.kind = spec.policy,
                                     .n_slot = class_spec.n_slot,
                                     .n_layer = n_layer,
                                     .n_expert = spec.n_expert,
                                     .decay_interval = spec.decay_interval});
    for (uint32_t i = class_spec.n_slot; i > 0; --i) size_class.empty.push_back(size_class.first_slot + i - 1);
    Slot slot;
    slot.size_class = static_cast<uint32_t>(pool->classes_.size());
    pool->slots_.insert(pool->slots_.end(), class_spec.n_slot, slot);
    pool->classes_.push_back(std::move(size_class));
  }
  return pool;
}

ResidentPool::Class& ResidentPool::class_of(ExpertId id) {
  SLUICE_ASSERT(id.layer < layer_class_.size() && id.expert < n_expert_, "layer {} expert {}", id.layer, id.expert);
  const uint32_t index = layer_class_[id.layer];
  SLUICE_ASSERT(index < classes_.size(), "layer {} has no streamed experts", id.layer);
  return classes_[index];
}

const ResidentPool::Slot& ResidentPool::checked(SlotRef ref) const {
  SLUICE_ASSERT(ref.slot < slots_.size(), "slot {} of {}", ref.slot, slots_.size());
  const Slot& slot = slots_[ref.slot];
  SLUICE_ASSERT(slot.generation == ref.generation, "slot {}: generation {} is gone, now {}", ref.slot, ref.generation,
                slot.generation);
  return slot;
}

std::optional<SlotRef> ResidentPool::find(ExpertId id) const {
  const uint32_t slot = slot_of_[size_t{id.layer} * n_expert_ + id.expert];
  if (slot == kNoSlotIndex) return std::nullopt;
  return SlotRef{slot, slots_[slot].generation};
}

bool ResidentPool::is_ready(SlotRef ref) const { return checked(ref).state == State::kReady; }

void ResidentPool::note_access(ExpertId id) { class_of(id).policy->on_access(id); }

void ResidentPool::advance() {
  for (Class& size_class : classes_) size_class.policy->advance();
}

void ResidentPool::pin(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kReady, "pin of slot {} that is not ready", ref.slot);
  if (slot.pins++ == 0) {
    Class& size_class = classes_[slot.size_class];
    size_class.policy->acquire(ref.slot - size_class.first_slot);
    ++n_pinned_;
  }
}

void ResidentPool::unpin(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kReady && slot.pins > 0, "unpin of slot {} that is not pinned", ref.slot);
  if (--slot.pins == 0) {
    Class& size_class = classes_[slot.size_class];
    size_class.policy->release(ref.slot - size_class.first_slot, slot.expert);
    --n_pinned_;
  }
}

void ResidentPool::vacate(uint32_t index) {
  Slot& slot = slots_[index];
  slot_of(slot.expert) = kNoSlotIndex;
  slot.state = State::kEmpty;
  ++slot.generation;
  if (poison_) {
    const Class& size_class = classes_[slot.size_class];
    std::memset(size_class.memory.data() + (index - size_class.first_slot) * size_class.slot_bytes, kPoison,
                size_class.slot_bytes);
  }
}

Result<SlotRef> ResidentPool::begin_load(ExpertId id) {
  Class& size_class = class_of(id);
  SLUICE_ASSERT(slot_of(id) == kNoSlotIndex, "layer {} expert {} is in the pool already", id.layer, id.expert);
  uint32_t index = kNoSlotIndex;
  if (!size_class.empty.empty()) {
    index = size_class.empty.back();
    size_class.empty.pop_back();
  } else if (const auto victim = size_class.policy->victim()) {
    size_class.policy->acquire(*victim);
    index = size_class.first_slot + *victim;
    ++evictions_;
    ++layer_evictions_[slots_[index].expert.layer];
    vacate(index);
  } else {
    return make_error(ErrorCode::kNoSlot, "layer {} expert {}: all {} slots of its size are pinned or loading", id.layer,
                      id.expert, size_class.n_slot);
  }
  Slot& slot = slots_[index];
  slot.state = State::kLoading;
  slot.expert = id;
  slot_of(id) = index;
  return SlotRef{index, slot.generation};
}

void ResidentPool::finish_load(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kLoading, "finish_load of slot {} that is not loading", ref.slot);
  slot.state = State::kReady;
  slot.pins = 1;
  ++n_pinned_;
}

void ResidentPool::fail_load(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kLoading, "fail_load of slot {} that is not loading", ref.slot);
  vacate(ref.slot);
  classes_[slot.size_class].empty.push_back(ref.slot);
}

std::byte* ResidentPool::slot_data(SlotRef ref) const {
  const Class& size_class = classes_[checked(ref).size_class];
  return size_class.memory.data() + (ref.slot - size_class.first_slot) * size_class.slot_bytes;
}

ExpertId ResidentPool::slot_expert(SlotRef ref) const { return checked(ref).expert; }

uint64_t ResidentPool::bytes() const {
  uint64_t total = 0;
  for (const Class& size_class : classes_) total += size_class.memory.bytes();
  return total;
}

}  // namespace sluice
