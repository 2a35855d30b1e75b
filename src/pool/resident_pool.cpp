#include "pool/resident_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/bytes.h"

namespace sluice {

namespace {

constexpr int kPoison = 0xa5;
constexpr uint32_t kIdsMax = uint32_t{1} << 16;  // of layers and of experts
constexpr size_t kClassesMax = std::numeric_limits<uint16_t>::max();

}  // namespace

Result<std::unique_ptr<ResidentPool>> ResidentPool::create(const PoolSpec& spec) {
  SLUICE_ASSERT(spec.side_generations == 1 || spec.side_generations == 2, "{} generations", spec.side_generations);
  SLUICE_ASSERT(spec.classes.size() <= kClassesMax, "{} size classes", spec.classes.size());
  std::unique_ptr<ResidentPool> pool(new ResidentPool);
  pool->n_expert_ = spec.n_expert;
  pool->poison_ = spec.poison_released_slots;
  pool->side_generations_ = spec.side_generations;
  const auto n_layer = static_cast<uint32_t>(spec.layer_class.size());
  SLUICE_ASSERT(n_layer <= kIdsMax && spec.n_expert <= kIdsMax, "{} layers of {} experts", n_layer, spec.n_expert);
  pool->slot_of_.assign(size_t{n_layer} * spec.n_expert, kNoSlotIndex);
  pool->layer_evictions_.assign(n_layer, 0);
  std::vector<uint32_t> n_layer_of_class(spec.classes.size(), 0);
  for (const uint32_t index : spec.layer_class) {
    SLUICE_ASSERT(index == PoolSpec::kNoClass || index < spec.classes.size(), "class {} of {}", index,
                  spec.classes.size());
    pool->layers_.push_back({index, index == PoolSpec::kNoClass ? 0 : n_layer_of_class[index]++});
  }
  for (const PoolClassSpec& class_spec : spec.classes) {
    Class size_class;
    size_class.slot_bytes = class_spec.slot_bytes;
    size_class.first_slot = pool->n_slot();
    size_class.n_slot = class_spec.n_slot;
    size_class.n_slot_min = class_spec.n_slot_min;
    size_class.n_side = class_spec.n_side;
    size_class.n_usable = class_spec.n_slot;
    size_class.n_target = class_spec.n_slot;
    if (pool->floor_of(size_class) > class_spec.n_slot) {
      return make_error(ErrorCode::kBadArgument,
                        "pool: {} slots of {} are too few for {} and a side region of {} generations of {}",
                        class_spec.n_slot, format_bytes(class_spec.slot_bytes), class_spec.n_slot_min,
                        spec.side_generations, class_spec.n_side);
    }
    const auto bytes = checked_mul(class_spec.slot_bytes, class_spec.n_slot);
    if (!bytes) {
      return make_error(ErrorCode::kNoMemory, "pool: {} slots of {} overflow", class_spec.n_slot,
                        class_spec.slot_bytes);
    }
    auto memory = SlotMemory::create(*bytes, spec.memory);
    if (!memory) return memory.error();
    size_class.memory = std::move(memory).value();
    for (const std::string& line : size_class.memory.missing()) pool->memory_missing_.push_back(line);
    size_class.policy = make_policy({.kind = spec.policy,
                                     .n_slot = class_spec.n_slot,
                                     .n_layer = n_layer_of_class[pool->classes_.size()],
                                     .n_expert = spec.n_expert,
                                     .decay_interval = spec.decay_interval});
    if (class_spec.n_side > 0) size_class.side.assign(spec.side_generations, SlotList(class_spec.n_slot));
    for (uint32_t i = class_spec.n_slot; i > 0; --i) size_class.empty.push_back(size_class.first_slot + i - 1);
    size_class.lent.reserve(class_spec.n_slot);
    Slot slot;
    slot.size_class = static_cast<uint16_t>(pool->classes_.size());
    pool->slots_.insert(pool->slots_.end(), class_spec.n_slot, slot);
    pool->classes_.push_back(std::move(size_class));
  }
  pool->filled_in_.assign(pool->slots_.size(), 0);
  return pool;
}

uint32_t ResidentPool::floor_of(const Class& size_class) const {
  return size_class.n_slot_min + side_generations_ * size_class.n_side;
}

ResidentPool::Class& ResidentPool::class_of(ExpertId id) {
  SLUICE_ASSERT(id.layer < layers_.size() && id.expert < n_expert_, "layer {} expert {}", id.layer, id.expert);
  const uint32_t index = layers_[id.layer].size_class;
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

bool ResidentPool::is_ready(SlotRef ref) const {
  return checked(ref).state == State::kReady;
}

bool ResidentPool::is_speculative(SlotRef ref) const {
  return checked(ref).speculative;
}

void ResidentPool::note_access(ExpertId id) {
  class_of(id).policy->on_access(policy_id(id));
}

void ResidentPool::advance() {
  ++forward_;
  for (Class& size_class : classes_) {
    size_class.policy->advance();
    if (side_generations_ != 2 || size_class.side.empty()) continue;
    // Those of two forwards ago have this forward's number; what of them is pinned or loading leaves later.
    SlotList& old = size_class.side[forward_ % 2];
    while (const auto slot = old.oldest()) expire(size_class.first_slot + *slot);
  }
}

void ResidentPool::pin(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kReady, "pin of slot {} that is not ready", ref.slot);
  SLUICE_ASSERT(slot.pins < std::numeric_limits<uint16_t>::max(), "slot {} has {} pins", ref.slot, slot.pins);
  if (slot.pins++ > 0) return;
  Class& size_class = classes_[slot.size_class];
  ++n_pinned_;
  ++size_class.n_pinned;
  const uint32_t own = ref.slot - size_class.first_slot;
  if (slot.speculative) {
    size_class.side[generation_of(ref.slot)].erase(own);
  } else {
    size_class.policy->acquire(own);
  }
}

void ResidentPool::unpin(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kReady && slot.pins > 0, "unpin of slot {} that is not pinned", ref.slot);
  if (--slot.pins > 0) return;
  Class& size_class = classes_[slot.size_class];
  --n_pinned_;
  --size_class.n_pinned;
  const uint32_t own = ref.slot - size_class.first_slot;
  if (!slot.speculative) {
    size_class.policy->release(own, policy_id(slot.id()));
    if (size_class.n_usable > size_class.n_target) settle_size(size_class);
    return;
  }
  size_class.side[generation_of(ref.slot)].push(own);
  if (has_expired(ref.slot)) expire(ref.slot);
}

// The slot is empty afterwards; the caller says what becomes of it.
void ResidentPool::evict(Class& size_class, uint32_t slot) {
  size_class.policy->acquire(slot - size_class.first_slot);
  ++evictions_;
  ++layer_evictions_[slots_[slot].layer];
  vacate(slot);
}

void ResidentPool::vacate(uint32_t index) {
  Slot& slot = slots_[index];
  slot_of(slot.id()) = kNoSlotIndex;
  slot.state = State::kEmpty;
  ++slot.generation;
  if (poison_) {
    const Class& size_class = classes_[slot.size_class];
    std::memset(size_class.memory.data() + (index - size_class.first_slot) * size_class.slot_bytes, kPoison,
                size_class.slot_bytes);
  }
}

void ResidentPool::leave_side(uint32_t slot) {
  --classes_[slots_[slot].size_class].side_count[generation_of(slot)];
  slots_[slot].speculative = false;
}

// A readable and unpinned slot of the side region becomes empty.
void ResidentPool::expire(uint32_t index) {
  Slot& slot = slots_[index];
  Class& size_class = classes_[slot.size_class];
  size_class.side[generation_of(index)].erase(index - size_class.first_slot);
  leave_side(index);
  vacate(index);
  ++side_counts_.expired;
  size_class.empty.push_back(index);
  if (size_class.n_usable > size_class.n_target) settle_size(size_class);
}

Error ResidentPool::no_slot(ExpertId id, const Class& size_class) const {
  return make_error(
      ErrorCode::kNoSlot,
      "layer {} expert {}: all {} slots of its size are taken: {} pinned, {} loading; {} in the side region", id.layer,
      id.expert, size_class.n_usable, size_class.n_pinned, size_class.n_loading,
      size_class.side_count[0] + size_class.side_count[1]);
}

// An empty slot, or a victim's; kNoSlotIndex when there is neither.
uint32_t ResidentPool::take_slot(Class& size_class) {
  if (!size_class.empty.empty()) {
    const uint32_t index = size_class.empty.back();
    size_class.empty.pop_back();
    return index;
  }
  const auto victim = size_class.policy->victim();
  if (!victim) return kNoSlotIndex;
  const uint32_t index = size_class.first_slot + *victim;
  evict(size_class, index);
  return index;
}

Result<SlotRef> ResidentPool::begin(ExpertId id, Class& size_class, bool speculative) {
  SLUICE_ASSERT(slot_of(id) == kNoSlotIndex, "layer {} expert {} is in the pool already", id.layer, id.expert);
  const uint32_t index = take_slot(size_class);
  if (index == kNoSlotIndex) return no_slot(id, size_class);
  Slot& slot = slots_[index];
  slot.state = State::kLoading;
  slot.layer = static_cast<uint16_t>(id.layer);
  slot.expert = static_cast<uint16_t>(id.expert);
  slot.speculative = speculative;
  filled_in_[index] = forward_;
  slot_of(id) = index;
  ++size_class.n_loading;
  return SlotRef{index, slot.generation};
}

Result<SlotRef> ResidentPool::begin_load(ExpertId id) {
  return begin(id, class_of(id), false);
}

Result<SlotRef> ResidentPool::begin_speculative_load(ExpertId id) {
  Class& size_class = class_of(id);
  const uint32_t generation = forward_ % side_generations_;
  if (size_class.side_count[generation] >= size_class.n_side) {
    const auto oldest = side_generations_ == 1 && size_class.n_side > 0 ? size_class.side[0].oldest() : std::nullopt;
    if (!oldest) {
      return make_error(ErrorCode::kNoSlot, "layer {} expert {}: all {} slots of the side region are in use", id.layer,
                        id.expert, size_class.n_side);
    }
    expire(size_class.first_slot + *oldest);
  }
  auto slot = begin(id, size_class, true);
  if (slot.ok()) ++size_class.side_count[generation];
  return slot;
}

void ResidentPool::finish_load(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kLoading, "finish_load of slot {} that is not loading", ref.slot);
  Class& size_class = classes_[slot.size_class];
  --size_class.n_loading;
  slot.state = State::kReady;
  if (!slot.speculative) {
    slot.pins = 1;
    ++n_pinned_;
    ++size_class.n_pinned;
    return;
  }
  ++side_counts_.loads;
  size_class.side[generation_of(ref.slot)].push(ref.slot - size_class.first_slot);
  if (has_expired(ref.slot)) expire(ref.slot);
}

void ResidentPool::fail_load(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.state == State::kLoading, "fail_load of slot {} that is not loading", ref.slot);
  Class& size_class = classes_[slot.size_class];
  --size_class.n_loading;
  if (slot.speculative) leave_side(ref.slot);
  vacate(ref.slot);
  size_class.empty.push_back(ref.slot);
  if (size_class.n_usable > size_class.n_target) settle_size(size_class);
}

void ResidentPool::promote(SlotRef ref) {
  Slot& slot = checked(ref);
  SLUICE_ASSERT(slot.speculative, "promote of slot {} that is not speculative", ref.slot);
  if (slot.state == State::kReady) pin(ref);
  leave_side(ref.slot);
  ++side_counts_.promoted;
}

void ResidentPool::resize(uint64_t bytes) {
  const uint64_t above_floor = bytes - std::min(bytes, bytes_min());
  const uint64_t above_floor_max = this->bytes() - bytes_min();
  const double share =
      above_floor >= above_floor_max ? 1.0 : static_cast<double>(above_floor) / static_cast<double>(above_floor_max);
  for (Class& size_class : classes_) {
    const uint32_t floor = floor_of(size_class);
    size_class.n_target = floor + static_cast<uint32_t>(share * static_cast<double>(size_class.n_slot - floor));
    settle_size(size_class);
  }
}

// Brings n_usable as near to n_target as pinned, loading and speculative slots allow.
void ResidentPool::settle_size(Class& size_class) {
  while (size_class.n_usable > size_class.n_target) {
    const uint32_t index = take_slot(size_class);
    if (index == kNoSlotIndex) return;
    lend(size_class, index);
  }
  while (size_class.n_usable < size_class.n_target) {
    const uint32_t index = size_class.lent.back();
    size_class.lent.pop_back();
    take_back(size_class, index);
    size_class.empty.push_back(index);
  }
}

void ResidentPool::lend(Class& size_class, uint32_t index) {
  slots_[index].state = State::kLent;
  size_class.lent.push_back(index);
  --size_class.n_usable;
  const uint64_t page = SlotMemory::page_bytes();
  if (size_class.slot_bytes < page) return;  // a page holds several slots: only their number shrinks
  // A page that is shared with a neighbour goes when both are lent.
  const auto is_lent = [&](uint32_t own) {
    return own >= size_class.n_slot || slots_[size_class.first_slot + own].state == State::kLent;
  };
  const uint32_t own = index - size_class.first_slot;
  uint64_t begin = own * size_class.slot_bytes;
  uint64_t end = begin + size_class.slot_bytes;
  begin = own > 0 && !is_lent(own - 1) ? align_up(begin, page) : align_down(begin, page);
  end = is_lent(own + 1) ? align_up(end, page) : align_down(end, page);
  if (begin < end) size_class.memory.give_back(begin, end - begin);
}

void ResidentPool::take_back(Class& size_class, uint32_t index) {
  slots_[index].state = State::kEmpty;
  ++size_class.n_usable;
  const uint64_t page = SlotMemory::page_bytes();
  if (size_class.slot_bytes < page) return;
  const uint64_t begin = (index - size_class.first_slot) * size_class.slot_bytes;
  const uint64_t end = align_up(begin + size_class.slot_bytes, page);
  size_class.memory.take_again(align_down(begin, page), end - align_down(begin, page));
}

std::byte* ResidentPool::slot_data(SlotRef ref) const {
  const Class& size_class = classes_[checked(ref).size_class];
  return size_class.memory.data() + (ref.slot - size_class.first_slot) * size_class.slot_bytes;
}

ExpertId ResidentPool::slot_expert(SlotRef ref) const {
  return checked(ref).id();
}

uint64_t ResidentPool::bytes() const {
  uint64_t total = 0;
  for (const Class& size_class : classes_) total += size_class.slot_bytes * size_class.n_slot;
  return total;
}

uint64_t ResidentPool::usable_bytes() const {
  uint64_t total = 0;
  for (const Class& size_class : classes_) total += size_class.slot_bytes * size_class.n_usable;
  return total;
}

uint64_t ResidentPool::bytes_min() const {
  uint64_t total = 0;
  for (const Class& size_class : classes_) total += size_class.slot_bytes * floor_of(size_class);
  return total;
}

}  // namespace sluice
