#include "pool/resident_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
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

TEST(ResidentPool, NothingEvictableIsAnErrorWithNumbers) {
  PoolSpec spec = one_class(4, 1, 8);
  spec.classes[0].n_side = 1;
  auto pool = std::move(ResidentPool::create(spec)).value();
  load(*pool, {0, 1});
  load(*pool, {0, 2});
  ASSERT_TRUE(pool->begin_load({0, 3}).ok());
  ASSERT_TRUE(pool->begin_speculative_load({0, 4}).ok());
  const auto fifth = pool->begin_load({0, 5});
  ASSERT_FALSE(fifth.ok());
  EXPECT_EQ(fifth.error().message(),
            "layer 0 expert 5: all 4 slots of its size are taken: 2 pinned, 2 loading; 1 in the side region");
  const auto sixth = pool->begin_speculative_load({0, 6});
  ASSERT_FALSE(sixth.ok());
  EXPECT_EQ(sixth.error().message(), "layer 0 expert 6: all 1 slots of the side region are in use");
}

TEST(ResidentPool, AClassTooSmallForItsSideRegionIsRefused) {
  PoolSpec spec = one_class(9, 1, 8);
  spec.classes[0].n_slot_min = 4;
  spec.classes[0].n_side = 3;
  const auto pool = ResidentPool::create(spec);
  ASSERT_FALSE(pool.ok());
  EXPECT_EQ(pool.error().message(), "pool: 9 slots of 64 B are too few for 4 and a side region of 2 generations of 3");
}

TEST(SideRegion, APromotedExpertKeepsItsPlaceAndIsAnOrdinaryOneAfterwards) {
  PoolSpec spec = one_class(4, 1, 16);
  spec.classes[0].n_side = 1;
  spec.poison_released_slots = true;
  auto pool = std::move(ResidentPool::create(spec)).value();
  const SlotRef slot = *pool->begin_speculative_load({0, 1});
  std::memset(pool->slot_data(slot), 7, kSlotBytes);
  pool->finish_load(slot);
  EXPECT_TRUE(pool->is_speculative(slot));
  EXPECT_EQ(pool->n_pinned(), 0u);
  const std::byte* data = pool->slot_data(slot);
  pool->promote(slot);
  EXPECT_FALSE(pool->is_speculative(slot));
  EXPECT_EQ(pool->n_pinned(), 1u);
  EXPECT_EQ(pool->find({0, 1}), slot);
  EXPECT_EQ(pool->slot_data(slot), data);
  EXPECT_EQ(data[kSlotBytes - 1], std::byte{7});
  // The side region has its quota back in exchange.
  EXPECT_TRUE(pool->begin_speculative_load({0, 2}).ok());
  pool->unpin(slot);
  pool->advance();
  pool->advance();
  EXPECT_EQ(pool->find({0, 1}), slot) << "it does not expire any more";
  EXPECT_EQ(pool->side_counts().promoted, 1u);
}

TEST(SideRegion, ALoadThatIsNeededBeforeItArrivesGoesOnAsADemandLoad) {
  PoolSpec spec = one_class(4, 1, 16);
  spec.classes[0].n_side = 1;
  auto pool = std::move(ResidentPool::create(spec)).value();
  const SlotRef slot = *pool->begin_speculative_load({0, 1});
  pool->promote(slot);
  EXPECT_FALSE(pool->is_ready(slot));
  EXPECT_TRUE(pool->begin_speculative_load({0, 2}).ok());
  pool->finish_load(slot);
  EXPECT_EQ(pool->n_pinned(), 1u);
  pool->unpin(slot);
}

TEST(SideRegion, ASpeculativeLoadThatArrivesTooLateLeavesAnEmptySlot) {
  PoolSpec spec = one_class(4, 1, 16);
  spec.classes[0].n_side = 1;
  auto pool = std::move(ResidentPool::create(spec)).value();
  const SlotRef late = *pool->begin_speculative_load({0, 1});
  pool->advance();
  pool->advance();
  EXPECT_FALSE(pool->begin_speculative_load({0, 2}).ok()) << "the slot of its generation is still being filled";
  pool->finish_load(late);
  EXPECT_FALSE(pool->find({0, 1}));
  EXPECT_EQ(pool->side_counts().expired, 1u);
  EXPECT_TRUE(pool->begin_speculative_load({0, 2}).ok());
}

TEST(SideRegionDeathTest, BytesCannotBeReadBeforeTheFillHasFinished) {
  PoolSpec spec = one_class(4, 1, 16);
  spec.classes[0].n_side = 1;
  auto pool = std::move(ResidentPool::create(spec)).value();
  const SlotRef slot = *pool->begin_speculative_load({0, 1});
  EXPECT_DEATH(pool->pin(slot), "not ready");
}

// A reader that was only enqueued: it notes an address during a forward and reads it at that forward's end, as a copy
// or a kernel on a stream does. It holds no pin.
struct EnqueuedRead {
  const std::byte* data = nullptr;
  std::byte expected{};
};

// Plays forwards in which every readable expert is read at the forward's end while the side region is filled with
// others. Returns the reads that saw bytes of another expert.
uint64_t overwritten_reads(uint32_t side_generations, bool drain_before_fill) {
  constexpr uint32_t kSide = 4;
  PoolSpec spec = one_class(2 * kSide + 1, 1, 256);
  spec.classes[0].n_side = kSide;
  spec.side_generations = side_generations;
  auto pool = std::move(ResidentPool::create(spec)).value();
  std::vector<SlotRef> readable;
  uint64_t overwritten = 0;
  std::vector<EnqueuedRead> stream;
  const auto run_stream = [&] {
    for (const EnqueuedRead& read : stream) overwritten += read.data[kSlotBytes / 2] != read.expected;
    stream.clear();
  };
  for (uint32_t forward = 0; forward < 50; ++forward) {
    for (const SlotRef slot : readable) {
      stream.push_back({pool->slot_data(slot), static_cast<std::byte>(pool->slot_expert(slot).expert)});
    }
    if (drain_before_fill) run_stream();
    std::vector<SlotRef> filled;
    for (uint32_t i = 0; i < kSide; ++i) {
      const ExpertId id{0, (forward * kSide + i) % 256};
      const auto slot = pool->begin_speculative_load(id);
      EXPECT_TRUE(slot.ok());
      std::memset(pool->slot_data(*slot), static_cast<int>(id.expert), kSlotBytes);
      pool->finish_load(*slot);
      filled.push_back(*slot);
    }
    run_stream();
    pool->advance();
    readable = filled;
  }
  return overwritten;
}

TEST(SideRegion, TwoGenerationsKeepWhatAnEnqueuedReaderMayStillRead) {
  EXPECT_EQ(overwritten_reads(2, false), 0u);
}

TEST(SideRegion, OneGenerationNeedsItsReadersDrainedBeforeItIsFilled) {
  EXPECT_EQ(overwritten_reads(1, true), 0u);
  EXPECT_GT(overwritten_reads(1, false), 0u) << "without the guarantee the overwrite must show";
}

// Pins as tokens that a thread of its own gives back later: whatever the pool does meanwhile, the reader sees its
// expert's bytes. Slots are written by the caller, read by the thread; only the tokens are exchanged under a lock, so
// that a slot taken too early is also a data race.
TEST(SideRegion, AnAsynchronousReaderWithATokenIsNeverOverwritten) {
  struct Token {
    SlotRef slot;
    const std::byte* data = nullptr;
    std::byte expected{};
  };
  for (const uint32_t generations : {1u, 2u}) {
    PoolSpec spec = one_class(24, 1, 48);
    spec.classes[0].n_side = 4;
    spec.classes[0].n_slot_min = 8;
    spec.side_generations = generations;
    spec.poison_released_slots = true;
    auto pool = std::move(ResidentPool::create(spec)).value();
    std::mutex mutex;
    std::deque<Token> enqueued;
    std::vector<SlotRef> done;
    bool stop = false;
    std::atomic<uint64_t> faults = 0;
    std::thread reader([&] {
      while (true) {
        Token token;
        {
          std::lock_guard lock(mutex);
          if (enqueued.empty() && stop) return;
          if (enqueued.empty()) continue;
          token = enqueued.front();
          enqueued.pop_front();
        }
        for (uint64_t i = 0; i < kSlotBytes; ++i) faults += token.data[i] != token.expected;
        std::lock_guard lock(mutex);
        done.push_back(token.slot);
      }
    });
    std::mt19937 random(generations);
    size_t n_token = 0;
    const auto drop_tokens = [&] {
      std::vector<SlotRef> dropped;
      {
        std::lock_guard lock(mutex);
        dropped.swap(done);
      }
      for (const SlotRef slot : dropped) pool->unpin(slot);
      n_token -= dropped.size();
    };
    for (int step = 0; step < 20'000; ++step) {
      // Most tokens come back late, but never all slots are out.
      do drop_tokens();
      while (n_token >= 8);
      if (step % 16 == 0) pool->advance();
      if (step % 1000 == 0) pool->resize(step % 2000 == 0 ? pool->bytes_min() : pool->bytes());
      const ExpertId id{0, static_cast<uint32_t>(random() % 48)};
      auto slot = pool->find(id);
      if (!slot) {
        const auto begun = random() % 2 == 0 ? pool->begin_load(id) : pool->begin_speculative_load(id);
        if (!begun) continue;
        std::memset(pool->slot_data(*begun), static_cast<int>(id.expert), kSlotBytes);
        pool->finish_load(*begun);
        slot = *begun;
        if (pool->is_speculative(*slot)) continue;
      } else if (pool->is_speculative(*slot) && random() % 2 == 0) {
        pool->promote(*slot);
      } else {
        pool->pin(*slot);
      }
      std::lock_guard lock(mutex);
      enqueued.push_back({*slot, pool->slot_data(*slot), static_cast<std::byte>(id.expert)});
      ++n_token;
    }
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    reader.join();
    drop_tokens();
    EXPECT_EQ(faults, 0u);
    EXPECT_EQ(pool->n_pinned(), 0u);
    EXPECT_GT(pool->evictions(), 100u);
    EXPECT_GT(pool->side_counts().promoted, 100u);
  }
}

uint64_t present_pages(const std::byte* data, uint64_t bytes) {
  std::vector<unsigned char> present(bytes / SlotMemory::page_bytes());
  EXPECT_EQ(mincore(const_cast<std::byte*>(data), present.size() * SlotMemory::page_bytes(), present.data()), 0);
  return static_cast<uint64_t>(std::count_if(present.begin(), present.end(), [](unsigned char p) { return p & 1; }));
}

// Slots that share pages with their neighbours: what stays keeps its bytes, what goes gives its memory back.
TEST(Resize, GivesMemoryBackAndLeavesTheOtherSlotsAlone) {
  for (const Wish lock : {Wish::kNo, Wish::kTry}) {
    constexpr uint64_t kBytes = 37'999;  // shares a page with both neighbours
    constexpr uint32_t kSlots = 40;
    PoolSpec spec = one_class(kSlots, 1, 64);
    spec.classes[0].slot_bytes = kBytes;
    spec.classes[0].n_slot_min = 4;
    spec.memory = {.huge = Wish::kNo, .lock = lock, .touch = true};
    auto pool = std::move(ResidentPool::create(spec)).value();
    std::vector<SlotRef> slots;
    for (uint32_t expert = 0; expert < kSlots; ++expert) {
      slots.push_back(load(*pool, {0, expert}));
      std::memset(pool->slot_data(slots.back()), static_cast<int>(expert + 1), kBytes);
    }
    const std::byte* memory = pool->slot_data(slots[0]);
    const uint64_t pages = kBytes * kSlots / SlotMemory::page_bytes();
    EXPECT_EQ(present_pages(memory, kBytes * kSlots), pages);
    for (uint32_t expert = 0; expert < kSlots; ++expert) {
      if (expert % 8 != 0) pool->unpin(slots[expert]);
    }
    pool->resize(0);
    EXPECT_EQ(pool->usable_bytes(), 5 * kBytes) << "the pinned ones stay, above the floor of 4";
    EXPECT_LE(present_pages(memory, kBytes * kSlots), 5 * (kBytes / SlotMemory::page_bytes() + 2));
    for (uint32_t expert = 0; expert < kSlots; expert += 8) {
      const std::byte* data = pool->slot_data(slots[expert]);
      EXPECT_TRUE(
          std::all_of(data, data + kBytes, [&](std::byte b) { return b == static_cast<std::byte>(expert + 1); }));
    }
    pool->unpin(slots[0]);
    EXPECT_EQ(pool->usable_bytes(), pool->bytes_min()) << "what was withheld follows at the release";
    pool->resize(UINT64_MAX);
    EXPECT_EQ(pool->usable_bytes(), pool->bytes());
    EXPECT_EQ(present_pages(memory, kBytes * kSlots), pages) << "memory is taken at once again";
    for (uint32_t expert = 8; expert < kSlots; expert += 8) {
      const std::byte* data = pool->slot_data(slots[expert]);
      EXPECT_TRUE(
          std::all_of(data, data + kBytes, [&](std::byte b) { return b == static_cast<std::byte>(expert + 1); }));
      EXPECT_EQ(pool->find({0, expert}), slots[expert]);
    }
  }
}

TEST(Resize, SharesWhatIsLeftOutToTheClasses) {
  PoolSpec spec;
  spec.classes = {{.slot_bytes = 64, .n_slot = 100, .n_slot_min = 10},
                  {.slot_bytes = 640, .n_slot = 20, .n_slot_min = 2}};
  spec.layer_class = {0, 1};
  spec.n_expert = 128;
  auto pool = std::move(ResidentPool::create(spec)).value();
  EXPECT_EQ(pool->bytes_min(), 10u * 64 + 2 * 640);
  pool->resize(pool->bytes_min() + (pool->bytes() - pool->bytes_min()) / 2);
  EXPECT_EQ(pool->usable_bytes(), 55u * 64 + 11 * 640);
  pool->resize(0);
  EXPECT_EQ(pool->usable_bytes(), pool->bytes_min());
}

// Random operations against plain maps: whatever the policy chooses, a slot's bytes stay its expert's while it is
// pinned, an expert is found exactly while it should be, and every refusal is one that the rules demand.
// SLUICE_POOL_SEEDS is how many seeds are tried with each policy.
class RandomOperations : public testing::TestWithParam<PolicyKind> {};

struct PoolModel {
  struct Held {
    SlotRef slot;
    bool ready = false;
    bool speculative = false;
    uint32_t forward = 0;  // that began the load
    uint64_t since = 0;    // readable and unpinned: since which operation
    uint32_t pins = 0;
  };
  struct Class {
    uint32_t usable = 0;
    uint32_t target = 0;
  };
  std::map<ExpertId, Held> held;
  std::vector<Class> classes;
};

TEST_P(RandomOperations, AgreeWithAPlainModel) {
  constexpr uint32_t kExperts = 24;
  constexpr uint64_t kOperations = 1'000'000;
  const char* wanted = std::getenv("SLUICE_POOL_SEEDS");
  const unsigned n_seed = wanted != nullptr ? static_cast<unsigned>(std::strtoul(wanted, nullptr, 10)) : 2;
  for (unsigned seed = 1; seed <= n_seed; ++seed) {
    SCOPED_TRACE(seed);
    PoolSpec spec;
    spec.classes = {{.slot_bytes = kSlotBytes, .n_slot = 14, .n_slot_min = 3, .n_side = 2},
                    {.slot_bytes = 2 * kSlotBytes, .n_slot = 9, .n_slot_min = 2, .n_side = 1}};
    spec.layer_class = {0, 1, PoolSpec::kNoClass, 0};
    spec.n_expert = kExperts;
    spec.policy = GetParam();
    spec.decay_interval = 50;
    spec.side_generations = seed % 2 + 1;
    spec.poison_released_slots = true;
    auto pool = std::move(ResidentPool::create(spec)).value();

    PoolModel model;
    for (const PoolClassSpec& size_class : spec.classes)
      model.classes.push_back({size_class.n_slot, size_class.n_slot});
    std::mt19937 random(seed);
    const auto fill = [](ExpertId id) { return static_cast<int>((id.layer * 37 + id.expert * 11 + 1) & 0x7f); };
    const auto class_of = [&](uint32_t layer) { return spec.layer_class[layer]; };
    uint32_t forward = 0;
    uint64_t evictions = 0;
    SideCounts side;
    uint32_t used = 0, evictable = 0, in_generation = 0;
    const auto expired = [&](const PoolModel::Held& entry) {
      return spec.side_generations == 2 && entry.speculative && forward - entry.forward >= 2;
    };
    const auto count = [&](uint32_t of_class) {
      used = evictable = in_generation = 0;
      for (const auto& [id, entry] : model.held) {
        if (class_of(id.layer) != of_class) continue;
        ++used;
        evictable += entry.ready && entry.pins == 0 && !entry.speculative;
        in_generation += entry.speculative && (forward - entry.forward) % spec.side_generations == 0;
      }
    };
    // Exactly `n` evictable experts of the class have left, and nobody else.
    const auto expect_evicted = [&](uint32_t of_class, uint32_t n) {
      evictions += n;
      uint32_t gone = 0;
      for (auto it = model.held.begin(); it != model.held.end();) {
        if (class_of(it->first.layer) != of_class || pool->find(it->first)) {
          ++it;
          continue;
        }
        ASSERT_TRUE(it->second.ready && it->second.pins == 0 && !it->second.speculative);
        it = model.held.erase(it);
        ++gone;
      }
      ASSERT_EQ(gone, n);
    };
    const auto settle = [&](uint32_t of_class) {
      PoolModel::Class& size_class = model.classes[of_class];
      if (size_class.usable <= size_class.target) {
        size_class.usable = size_class.target;
        return;
      }
      count(of_class);
      const uint32_t empty = size_class.usable - used;
      const uint32_t fewer = std::min(size_class.usable - size_class.target, empty + evictable);
      expect_evicted(of_class, fewer - std::min(fewer, empty));
      size_class.usable -= fewer;
    };
    const auto forget = [&](std::map<ExpertId, PoolModel::Held>::iterator it) {
      const uint32_t of_class = class_of(it->first.layer);
      model.held.erase(it);
      settle(of_class);
    };

    for (uint64_t operation = 0; operation < kOperations && !HasFatalFailure(); ++operation) {
      const uint32_t layer = std::array<uint32_t, 3>{0, 1, 3}[random() % 3];
      const ExpertId id{layer, static_cast<uint32_t>(random() % kExperts)};
      const uint32_t of_class = class_of(layer);
      const auto it = model.held.find(id);
      ASSERT_EQ(pool->find(id).has_value(), it != model.held.end());
      PoolModel::Held* entry = it == model.held.end() ? nullptr : &it->second;
      switch (const uint32_t what = random() % 16) {
        case 0:
        case 1:
        case 2:
        case 3: {  // load, speculatively or not
          pool->note_access(id);
          if (entry != nullptr) break;
          const bool speculative = what == 3;
          count(of_class);
          if (speculative && in_generation == spec.classes[of_class].n_side) {
            auto oldest = model.held.end();
            for (auto other = model.held.begin(); other != model.held.end(); ++other) {
              if (class_of(other->first.layer) != of_class || !other->second.speculative) continue;
              if (!other->second.ready || other->second.pins > 0) continue;
              if (oldest == model.held.end() || other->second.since < oldest->second.since) oldest = other;
            }
            if (spec.side_generations == 2 || oldest == model.held.end()) {
              ASSERT_FALSE(pool->begin_speculative_load(id).ok());
              break;
            }
            const auto slot = pool->begin_speculative_load(id);
            ASSERT_FALSE(pool->find(oldest->first));
            ++side.expired;
            forget(oldest);
            if (!slot) break;
            count(of_class);
            expect_evicted(of_class, used < model.classes[of_class].usable ? 0 : 1);
            model.held[id] = {.slot = *slot, .speculative = true, .forward = forward};
            break;
          }
          const auto slot = speculative ? pool->begin_speculative_load(id) : pool->begin_load(id);
          const uint32_t empty = model.classes[of_class].usable - used;
          ASSERT_EQ(slot.ok(), empty > 0 || evictable > 0);
          if (!slot.ok()) break;
          expect_evicted(of_class, empty > 0 ? 0 : 1);
          model.held[id] = {.slot = *slot, .speculative = speculative, .forward = forward};
          break;
        }
        case 4:
        case 5: {  // finish or fail
          if (entry == nullptr || entry->ready) break;
          if (random() % 8 == 0) {
            pool->fail_load(entry->slot);
            forget(it);
            break;
          }
          std::memset(pool->slot_data(entry->slot), fill(id), kSlotBytes);
          pool->finish_load(entry->slot);
          entry->ready = true;
          entry->since = operation;
          if (!entry->speculative) {
            entry->pins = 1;
          } else {
            ++side.loads;
            if (!expired(*entry)) break;
            ++side.expired;
            forget(it);
          }
          break;
        }
        case 6:
        case 7:
          if (entry != nullptr && entry->ready) {
            ASSERT_EQ(std::to_integer<int>(pool->slot_data(entry->slot)[0]), fill(id));
            pool->pin(entry->slot);
            ++entry->pins;
          }
          break;
        case 8:
          if (entry != nullptr && entry->speculative) {
            pool->promote(entry->slot);
            ++side.promoted;
            entry->speculative = false;
            if (entry->ready) ++entry->pins;
          }
          break;
        case 9:
          if (random() % 8 == 0) {
            pool->advance();
            ++forward;
            for (auto other = model.held.begin(); other != model.held.end();) {
              const auto next = std::next(other);
              if (expired(other->second) && other->second.ready && other->second.pins == 0) {
                ASSERT_FALSE(pool->find(other->first));
                ++side.expired;
                model.held.erase(other);
              }
              other = next;
            }
            for (uint32_t i = 0; i < model.classes.size(); ++i) settle(i);
          }
          break;
        case 10:
          if (random() % 64 == 0) {
            const uint64_t range = pool->bytes() - pool->bytes_min();
            const uint64_t above = random() % 2 == 0 ? range : range * (random() % 8) / 8;
            pool->resize(pool->bytes_min() + above);
            for (uint32_t i = 0; i < model.classes.size(); ++i) {
              const uint32_t floor = spec.classes[i].n_slot_min + spec.side_generations * spec.classes[i].n_side;
              const double share = static_cast<double>(above) / static_cast<double>(range);
              model.classes[i].target = floor + static_cast<uint32_t>(share * (spec.classes[i].n_slot - floor));
              settle(i);
            }
          }
          break;
        default:
          if (entry == nullptr || entry->pins == 0) break;
          ASSERT_EQ(std::to_integer<int>(pool->slot_data(entry->slot)[kSlotBytes - 1]), fill(id));
          pool->unpin(entry->slot);
          if (--entry->pins > 0) break;
          entry->since = operation;
          if (expired(*entry)) {
            ++side.expired;
            forget(it);
          } else if (!entry->speculative) {
            settle(of_class);
          }
          break;
      }
      uint64_t usable_bytes = 0;
      for (uint32_t i = 0; i < model.classes.size(); ++i) {
        usable_bytes += model.classes[i].usable * spec.classes[i].slot_bytes;
      }
      ASSERT_EQ(pool->usable_bytes(), usable_bytes);
    }
    EXPECT_GT(evictions, 10'000u);
    EXPECT_EQ(pool->evictions(), evictions);
    EXPECT_GT(side.expired, 1'000u);
    EXPECT_GT(side.promoted, 1'000u);
    EXPECT_EQ(pool->side_counts().loads, side.loads);
    EXPECT_EQ(pool->side_counts().promoted, side.promoted);
    EXPECT_EQ(pool->side_counts().expired, side.expired);
    uint32_t pinned = 0;
    for (const auto& [id, entry] : model.held) pinned += entry.pins > 0;
    EXPECT_EQ(pool->n_pinned(), pinned);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RandomOperations, testing::ValuesIn(kPolicyKinds),
                         [](const auto& test) { return std::string(policy_name(test.param)); });

}  // namespace
}  // namespace sluice
