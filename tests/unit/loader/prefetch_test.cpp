// What a demand and the prefetches before it do to each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "io/fault_device.h"
#include "loader/loader.h"
#include "loader_fixture.h"
#include "step_device.h"

namespace sluice {
namespace {

constexpr uint32_t kTopK = 2;

std::unique_ptr<Loader> make_loader(const TestModel& model, std::unique_ptr<Device> device, double share) {
  const SlotPlan layout = plan_layout(model.sources, kTopK);
  const auto room = static_cast<double>(layout.bytes_all - layout.bytes_min);
  auto loader = Loader::create(model.sources, std::move(device),
                               {.budget_bytes = layout.bytes_min + static_cast<uint64_t>(share * room),
                                .top_k = kTopK,
                                .prefetch = true,
                                .verify_slots = true,
                                .poison_released_slots = true});
  EXPECT_TRUE(loader.ok()) << loader.error().message();
  return std::move(loader).value();
}

// One demand to its end, every byte compared.
Status run_demand(Loader& loader, const TestModel& model, size_t source_index, const std::vector<uint32_t>& experts) {
  const LayerSource& source = model.sources[source_index];
  if (Status status = loader.start(source.layer, experts); !status) return status;
  size_t seen = 0;
  for (;;) {
    const auto ready = loader.next();
    if (!ready) {
      loader.end();
      return ready.error();
    }
    if (ready->empty()) break;
    seen += ready->size();
    for (const ReadyExpert& expert : *ready) {
      for (size_t m = 0; m < source.matrices.size(); ++m) {
        const auto expected = model.slab(source_index, m, experts[expert.index]);
        const std::byte* given = expert.slab[static_cast<size_t>(source.matrices[m].role)];
        EXPECT_EQ(std::memcmp(given, expected.data(), expected.size()), 0) << "expert " << experts[expert.index];
      }
    }
  }
  loader.end();
  EXPECT_EQ(seen, experts.size());
  return {};
}

EngineStats stats_of(const Loader& loader) {
  EngineStats stats;
  loader.add_stats(stats);
  return stats;
}

class PrefetchTest : public testing::Test {
 protected:
  // Buffered, so that nothing is staged and a read is one span.
  void open(double share, uint32_t n_expert = 32, size_t n_layer = 2) {
    model_ = make_test_model(std::vector<uint64_t>(n_layer, 48), n_expert, DirectMode::kOff);
    auto device = std::make_unique<StepDevice>();
    device_ = device.get();
    loader_ = make_loader(*model_, std::move(device), share);
  }
  uint32_t layer(size_t source) const { return model_->sources[source].layer; }
  size_t n_span() const { return model_->sources.front().spans.size(); }

  std::unique_ptr<TestModel> model_;
  StepDevice* device_ = nullptr;
  std::unique_ptr<Loader> loader_;
};

TEST_F(PrefetchTest, WhatIsThereIsAHit) {
  open(0.5);
  const std::vector<uint32_t> predicted = {3, 4};
  loader_->prefetch(layer(1), predicted, loader_->demands());
  device_->let(2 * n_span());
  ASSERT_TRUE(run_demand(*loader_, *model_, 1, {3, 4}).ok());
  const EngineStats stats = stats_of(*loader_);
  EXPECT_EQ(stats.experts.hits, 2u);
  EXPECT_EQ(stats.prefetch.submitted, 2u);
  EXPECT_EQ(stats.prefetch.ready_on_time, 2u);
  EXPECT_EQ(stats.prefetch.materialised, 2u);
  EXPECT_EQ(stats.prefetch.bytes, stats.prefetch.bytes_taken);
  EXPECT_EQ(device_->submitted().size(), 2 * n_span());
}

TEST_F(PrefetchTest, WhatIsOnItsWayIsNeverReadTwice) {
  open(0.5);
  const std::vector<uint32_t> predicted = {3, 4};
  loader_->prefetch(layer(1), predicted, loader_->demands());
  device_->let(1);  // a part of expert 3
  ASSERT_TRUE(run_demand(*loader_, *model_, 1, {3, 5}).ok());
  const EngineStats stats = stats_of(*loader_);
  EXPECT_EQ(stats.experts.misses, 2u);
  EXPECT_EQ(stats.prefetch.not_ready, 1u);
  EXPECT_EQ(stats.prefetch.cancelled, 1u);  // 4, in vain
  auto reads = device_->submitted();
  std::sort(reads.begin(), reads.end());
  EXPECT_EQ(std::adjacent_find(reads.begin(), reads.end()), reads.end());
}

TEST_F(PrefetchTest, ResidentExpertsAndThoseOnTheirWayAreLeftOut) {
  open(0.5);
  ASSERT_TRUE(run_demand(*loader_, *model_, 1, {7, 8}).ok());
  const std::vector<uint32_t> predicted = {7, 9, 9};
  loader_->prefetch(layer(1), predicted, loader_->demands());
  EXPECT_EQ(stats_of(*loader_).prefetch.submitted, 1u);
}

TEST_F(PrefetchTest, APredictionThatComesAfterItsDemandIsDropped) {
  open(0.5);
  const uint64_t seen = loader_->demands();
  ASSERT_TRUE(run_demand(*loader_, *model_, 1, {1, 2}).ok());
  const std::vector<uint32_t> predicted = {3, 4};
  loader_->prefetch(layer(1), predicted, seen);
  EXPECT_EQ(stats_of(*loader_).prefetch.late, 2u);
  EXPECT_EQ(stats_of(*loader_).prefetch.submitted, 0u);
}

TEST_F(PrefetchTest, ADemandOvertakesAThousandPrefetches) {
  open(0.85, 1024, 10);
  std::vector<uint32_t> predicted(1000);
  std::iota(predicted.begin(), predicted.end(), 0u);
  loader_->prefetch(layer(1), predicted, loader_->demands());
  ASSERT_EQ(stats_of(*loader_).prefetch.submitted, 1000u);
  ASSERT_EQ(device_->pending(), 1000 * n_span());

  ASSERT_TRUE(run_demand(*loader_, *model_, 0, {5, 6}).ok());
  EXPECT_EQ(device_->stats().reads, 2 * n_span());  // nothing else was read first
  EXPECT_EQ(device_->pending(), 1000 * n_span());

  // Their layer wants something else: they go, and their slots are free again.
  ASSERT_TRUE(run_demand(*loader_, *model_, 1, {1001, 1002}).ok());
  EXPECT_EQ(stats_of(*loader_).prefetch.cancelled, 1000u);
  EXPECT_EQ(device_->pending(), 0u);
  loader_->prefetch(layer(2), predicted, loader_->demands());
  EXPECT_EQ(stats_of(*loader_).prefetch.submitted, 2000u);
  EXPECT_EQ(stats_of(*loader_).prefetch.refused, 0u);
}

TEST_F(PrefetchTest, APoolAtItsFloorOrOneThatHoldsAllPrefetchesNothing) {
  for (const double share : {0.0, 1.0}) {
    open(share);
    EXPECT_FALSE(loader_->can_prefetch());
    const std::vector<uint32_t> predicted = {3, 4};
    loader_->prefetch(layer(1), predicted, loader_->demands());
    EXPECT_EQ(stats_of(*loader_).prefetch.submitted, 0u);
    EXPECT_EQ(stats_of(*loader_).prefetch.refused, 2u);
  }
}

struct Chance {
  const char* name;
  std::vector<uint64_t> slab_bytes;
  DirectMode mode;
  bool prefetch_fails;
};

class PrefetchChances : public testing::TestWithParam<Chance> {};

// Random routing, predictions that are right half of the time, late and reordered reads, slots overwritten when they
// are given up: every demand gets its bytes.
TEST_P(PrefetchChances, EveryDemandGetsItsBytes) {
  constexpr uint32_t kExperts = 24;
  const auto model = make_test_model(GetParam().slab_bytes, kExperts, GetParam().mode);
  PrefetchCounters total;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    auto inner = std::move(open_device({})).value();
    if (GetParam().prefetch_fails) inner = std::make_unique<PrefetchFails>(std::move(inner));
    auto device =
        std::make_unique<FaultDevice>(std::move(inner), FaultOptions{.seed = seed, .delay = 0.5, .reorder = 0.5});
    auto loader = make_loader(*model, std::move(device), 0.2 + 0.2 * static_cast<double>(seed % 4));
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto choose = [&](size_t most) {
      std::vector<uint32_t> experts(kExperts);
      std::iota(experts.begin(), experts.end(), 0u);
      std::shuffle(experts.begin(), experts.end(), random);
      experts.resize(1 + random() % most);
      return experts;
    };
    for (int pass = 0; pass < 60; ++pass) {
      std::vector<std::vector<uint32_t>> wanted;
      for (size_t i = 0; i < model->sources.size(); ++i) wanted.push_back(choose(pass % 8 == 0 ? kExperts : 4));
      for (size_t i = 0; i < model->sources.size(); ++i) {
        for (size_t ahead = i; ahead < model->sources.size(); ++ahead) {
          if (random() % 3 == 0) continue;
          const std::vector<uint32_t> predicted = random() % 2 == 0 ? wanted[ahead] : choose(8);
          loader->prefetch(model->sources[ahead].layer, predicted, loader->demands());
        }
        const Status status = run_demand(*loader, *model, i, wanted[i]);
        ASSERT_TRUE(status.ok()) << status.error().message();
      }
    }
    const EngineStats stats = stats_of(*loader);
    total += stats.prefetch;
    EXPECT_EQ(stats.experts.hits + stats.experts.misses, stats.experts.requests);
    EXPECT_EQ(loader->pool().n_pinned(), 0u);
    EXPECT_EQ(*loader->verify_all_slots(), 0u);
  }
  EXPECT_GT(total.not_ready, 0u);
  EXPECT_GT(total.submitted, 100u);
  if (GetParam().prefetch_fails) {
    EXPECT_EQ(total.ready_on_time, 0u);
    EXPECT_GT(total.failed, 0u);
  } else {
    EXPECT_GT(total.ready_on_time, 0u);
    EXPECT_EQ(total.failed, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PrefetchChances,
                         testing::Values(Chance{"staged", {3000, 5000, 3000}, DirectMode::kAuto, false},
                                         Chance{"in_place", {200000, 120000}, DirectMode::kAuto, false},
                                         Chance{"buffered", {3000, 7001, 3000, 3000}, DirectMode::kOff, false},
                                         Chance{"failing", {3000, 5000, 3000}, DirectMode::kAuto, true},
                                         Chance{"failing_in_place", {200000, 120000}, DirectMode::kAuto, true}),
                         [](const auto& chance) { return std::string(chance.param.name); });

}  // namespace
}  // namespace sluice
