#include "pool/resident_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

namespace sluice {
namespace {

constexpr uint64_t kSlotBytes = 64;

PoolSpec one_class(uint32_t n_slot, uint32_t n_layer, uint32_t n_expert) {
  PoolSpec spec;
  spec.classes = {{kSlotBytes, n_slot}};
  spec.layer_class.assign(n_layer, 0);
  spec.n_expert = n_expert;
  return spec;
}

SlotRef load(ResidentPool& pool, ExpertId id) {
  auto slot = pool.begin_load(id);
  EXPECT_TRUE(slot.ok());
  pool.finish_load(*slot);
  return *slot;
}

TEST(ResidentPool, EvictsTheLeastRecentlyReleased) {
  auto pool = std::move(ResidentPool::create(one_class(2, 1, 8))).value();
  const SlotRef a = load(*pool, {0, 1});
  const SlotRef b = load(*pool, {0, 2});
  pool->unpin(b);
  pool->unpin(a);
  const SlotRef c = load(*pool, {0, 3});
  EXPECT_EQ(c.slot, b.slot);
  EXPECT_EQ(c.generation, b.generation + 1);
  EXPECT_FALSE(pool->find({0, 2}));
  EXPECT_TRUE(pool->find({0, 1}));
  EXPECT_EQ(pool->evictions(), 1u);
}

TEST(ResidentPool, PinnedAndLoadingSlotsAreNeverTaken) {
  auto pool = std::move(ResidentPool::create(one_class(2, 1, 8))).value();
  load(*pool, {0, 1});
  ASSERT_TRUE(pool->begin_load({0, 2}).ok());
  const auto third = pool->begin_load({0, 3});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, ErrorCode::kNoSlot);
  EXPECT_NE(third.error().message().find("all 2 slots"), std::string::npos);
}

TEST(ResidentPool, AFailedLoadLeavesNothingBehind) {
  auto pool = std::move(ResidentPool::create(one_class(1, 1, 8))).value();
  const SlotRef slot = *pool->begin_load({0, 5});
  pool->fail_load(slot);
  EXPECT_FALSE(pool->find({0, 5}));
  const SlotRef again = load(*pool, {0, 5});
  EXPECT_EQ(again.slot, slot.slot);
  EXPECT_NE(again.generation, slot.generation);
}

TEST(ResidentPool, PoisonShowsAReaderWithoutAPin) {
  PoolSpec spec = one_class(1, 1, 8);
  spec.poison_released_slots = true;
  auto pool = std::move(ResidentPool::create(spec)).value();
  const SlotRef slot = load(*pool, {0, 1});
  std::memset(pool->slot_data(slot), 7, kSlotBytes);
  const std::byte* stale = pool->slot_data(slot);
  pool->unpin(slot);
  EXPECT_EQ(stale[0], std::byte{7});
  ASSERT_TRUE(pool->begin_load({0, 2}).ok());
  EXPECT_EQ(stale[0], std::byte{0xa5});
}

TEST(ResidentPoolDeathTest, MisuseAsserts) {
  auto pool = std::move(ResidentPool::create(one_class(2, 1, 8))).value();
  const SlotRef slot = load(*pool, {0, 1});
  EXPECT_DEATH((void)pool->begin_load({0, 1}), "in the pool already");
  pool->unpin(slot);
  EXPECT_DEATH(pool->unpin(slot), "not pinned");
  load(*pool, {0, 2});
  load(*pool, {0, 3});
  EXPECT_DEATH(pool->pin(slot), "generation");
}

// Random operations against plain maps: whatever the policy chooses, a slot's bytes stay its expert's while it is
// pinned, and an expert is found exactly while it should be.
class RandomOperations : public testing::TestWithParam<std::tuple<PolicyKind, unsigned>> {};

TEST_P(RandomOperations, AgreeWithAPlainModel) {
  const auto [policy, seed] = GetParam();
  constexpr uint32_t kExperts = 24;
  constexpr int kOperations = 300'000;
  PoolSpec spec;
  spec.classes = {{kSlotBytes, 9}, {2 * kSlotBytes, 6}};
  spec.layer_class = {0, 1, PoolSpec::kNoClass, 0};
  spec.n_expert = kExperts;
  spec.policy = policy;
  spec.decay_interval = 50;
  spec.poison_released_slots = true;
  auto pool = std::move(ResidentPool::create(spec)).value();

  struct Held {
    SlotRef slot;
    bool ready = false;
    uint32_t pins = 0;
  };
  std::map<ExpertId, Held> model;  // what may be in the pool: an entry whose pins are 0 may be evicted at any load
  std::mt19937 random(seed);
  const auto fill = [](ExpertId id) { return static_cast<int>((id.layer * 37 + id.expert * 11 + 1) & 0x7f); };
  const auto slots_of = [&](uint32_t layer) { return spec.classes[spec.layer_class[layer]].n_slot; };
  uint64_t evictions = 0;
  for (int operation = 0; operation < kOperations; ++operation) {
    const uint32_t layer = std::vector<uint32_t>{0, 1, 3}[random() % 3];
    const ExpertId id{layer, static_cast<uint32_t>(random() % kExperts)};
    const auto held = model.find(id);
    ASSERT_EQ(pool->find(id).has_value(), held != model.end());
    switch (random() % 8) {
      case 0:
      case 1: {  // load
        pool->note_access(id);
        if (held != model.end()) break;
        uint32_t busy = 0;
        uint32_t used = 0;
        for (const auto& [other, entry] : model) {
          if (spec.layer_class[other.layer] != spec.layer_class[layer]) continue;
          ++used;
          busy += !entry.ready || entry.pins > 0;
        }
        const auto slot = pool->begin_load(id);
        ASSERT_EQ(slot.ok(), busy < slots_of(layer));
        if (!slot.ok()) break;
        if (used == slots_of(layer)) {  // somebody must have gone, and it was evictable
          int gone = 0;
          for (auto it = model.begin(); it != model.end();) {
            if (pool->find(it->first)) {
              ++it;
              continue;
            }
            ASSERT_TRUE(it->second.ready && it->second.pins == 0);
            it = model.erase(it);
            ++gone;
          }
          ASSERT_EQ(gone, 1);
          ++evictions;
        }
        model[id] = {*slot, false, 0};
        break;
      }
      case 2: {  // finish or fail
        if (held == model.end() || held->second.ready) break;
        if (random() % 4 == 0) {
          pool->fail_load(held->second.slot);
          model.erase(held);
        } else {
          std::memset(pool->slot_data(held->second.slot), fill(id), kSlotBytes);
          pool->finish_load(held->second.slot);
          held->second.ready = true;
          held->second.pins = 1;
        }
        break;
      }
      case 3:
        if (held != model.end() && held->second.ready) {
          pool->pin(held->second.slot);
          ++held->second.pins;
        }
        break;
      case 4:
      case 5:
      case 6:
        if (held != model.end() && held->second.pins > 0) {
          ASSERT_EQ(std::to_integer<int>(pool->slot_data(held->second.slot)[kSlotBytes - 1]), fill(id));
          pool->unpin(held->second.slot);
          --held->second.pins;
        }
        break;
      default:
        if (random() % 8 == 0) pool->advance();
        break;
    }
  }
  EXPECT_GT(evictions, 1000u);
  EXPECT_EQ(pool->evictions(), evictions);
  uint32_t pinned = 0;
  for (const auto& [id, entry] : model) pinned += entry.pins > 0;
  EXPECT_EQ(pool->n_pinned(), pinned);
}

INSTANTIATE_TEST_SUITE_P(Policies, RandomOperations,
                         testing::Combine(testing::Values(PolicyKind::kLru, PolicyKind::kLfu, PolicyKind::kLfru, PolicyKind::kS3Fifo),
                                          testing::Values(1u, 2u, 3u)),
                         [](const auto& test) {
                           return std::string(policy_name(std::get<0>(test.param))) + "_" + std::to_string(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace sluice
