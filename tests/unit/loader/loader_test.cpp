#include "loader/loader.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "io/fault_device.h"
#include "io/memory_device.h"
#include "loader_fixture.h"

namespace sluice {
namespace {

std::unique_ptr<Device> real_device() { return std::move(open_device({})).value(); }

std::unique_ptr<Loader> make_loader(const TestModel& model, std::unique_ptr<Device> device, uint64_t budget_bytes,
                                    bool verify_slots = false) {
  auto loader = Loader::create(model.sources, std::move(device),
                               {.budget_bytes = budget_bytes, .top_k = 2, .verify_slots = verify_slots, .poison_released_slots = true});
  EXPECT_TRUE(loader.ok()) << loader.error().message();
  return std::move(loader).value();
}

// Runs one demand to its end and compares every slab that is handed out; the number of experts that came.
Result<size_t> run_demand(Loader& loader, const TestModel& model, size_t source_index, const std::vector<uint32_t>& experts) {
  const LayerSource& source = model.sources[source_index];
  if (Status status = loader.start(source.layer, experts); !status) return status.error();
  std::set<uint32_t> seen;
  for (;;) {
    const auto ready = loader.next();
    if (!ready) {
      loader.end();
      return ready.error();
    }
    if (ready->empty()) break;
    for (const ReadyExpert& expert : *ready) {
      EXPECT_TRUE(seen.insert(expert.index).second) << "handed out twice";
      for (size_t m = 0; m < source.matrices.size(); ++m) {
        const auto expected = model.slab(source_index, m, experts[expert.index]);
        const std::byte* given = expert.slab[static_cast<size_t>(source.matrices[m].role)];
        EXPECT_NE(given, nullptr);
        EXPECT_EQ(std::memcmp(given, expected.data(), expected.size()), 0)
            << "layer " << source.layer << " expert " << experts[expert.index] << " matrix " << m;
      }
    }
  }
  loader.end();
  return seen.size();
}

struct Shape {
  const char* name;
  std::vector<uint64_t> slab_bytes;
  DirectMode mode;
};

class LoaderShapes : public testing::TestWithParam<Shape> {};

TEST_P(LoaderShapes, HandsOutExactBytesAtEveryBudget) {
  const auto model = make_test_model(GetParam().slab_bytes, 24, GetParam().mode);
  const SlotPlan layout = plan_layout(model->sources, 2);
  for (const double share : {0.0, 0.1, 0.5, 1.0}) {
    const auto budget = layout.bytes_min + static_cast<uint64_t>(share * static_cast<double>(layout.bytes_all - layout.bytes_min));
    auto loader = make_loader(*model, real_device(), budget, share == 0.5);
    std::mt19937 random(7);
    for (int step = 0; step < 120; ++step) {
      const size_t source = static_cast<size_t>(step) % model->sources.size();
      std::vector<uint32_t> experts(24);
      std::iota(experts.begin(), experts.end(), 0u);
      std::shuffle(experts.begin(), experts.end(), random);
      experts.resize(1 + random() % (step % 10 == 0 ? 24 : 4));
      const auto count = run_demand(*loader, *model, source, experts);
      ASSERT_TRUE(count.ok()) << count.error().message();
      ASSERT_EQ(*count, experts.size());
    }
    EngineStats stats;
    loader->add_stats(stats);
    EXPECT_EQ(stats.experts.hits + stats.experts.misses, stats.experts.requests);
    EXPECT_EQ(stats.experts.loads, stats.experts.misses);
    EXPECT_LE(stats.pool_bytes, budget);
    EXPECT_EQ(loader->pool().n_pinned(), 0u);
    if (share < 1) {
      EXPECT_GT(stats.experts.evictions, 0u);
    } else {
      EXPECT_EQ(stats.experts.evictions, 0u);
      EXPECT_EQ(stats.experts.misses, 24 * model->sources.size());
    }
    EXPECT_EQ(*loader->verify_all_slots(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LoaderShapes,
                         testing::Values(Shape{"staged", {3000, 5000}, DirectMode::kAuto},
                                         Shape{"in_place", {200000, 120000}, DirectMode::kAuto},
                                         Shape{"buffered", {3000, 70001}, DirectMode::kOff}),
                         [](const auto& test) { return test.param.name; });

TEST(Loader, EachExpertIsReadOncePerDemandWhenTheyDoNotFit) {
  const auto model = make_test_model({200000}, 24, DirectMode::kAuto);
  auto loader = make_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_min);
  std::vector<uint32_t> experts(24);
  std::iota(experts.begin(), experts.end(), 0u);
  ASSERT_EQ(*run_demand(*loader, *model, 0, experts), 24u);
  EngineStats stats;
  loader->add_stats(stats);
  EXPECT_EQ(stats.experts.loads, 24u);
  EXPECT_EQ(stats.experts.unplaced, 22u);
  EXPECT_EQ(stats.experts.bytes_read, model->sources[0].record_bytes() * 24);
}

// The same requests give the same hits whatever order the drive answers in.
TEST(Loader, CountersDoNotDependOnTheDrivesTiming) {
  const auto model = make_test_model({3000, 5000}, 24, DirectMode::kAuto);
  const SlotPlan layout = plan_layout(model->sources, 2);
  std::vector<std::vector<uint64_t>> runs;
  for (const uint64_t seed : {1u, 2u, 3u}) {
    auto device = std::make_unique<FaultDevice>(real_device(), FaultOptions{.seed = seed, .delay = 0.3, .reorder = 0.7});
    auto loader = make_loader(*model, std::move(device), layout.bytes_min + layout.bytes_all / 5);
    std::mt19937 random(11);
    for (int step = 0; step < 400; ++step) {
      std::vector<uint32_t> experts(24);
      std::iota(experts.begin(), experts.end(), 0u);
      std::shuffle(experts.begin(), experts.end(), random);
      experts.resize(1 + random() % (step % 7 == 0 ? 24 : 3));
      ASSERT_TRUE(run_demand(*loader, *model, static_cast<size_t>(step % 2), experts).ok());
    }
    EngineStats stats;
    loader->add_stats(stats);
    runs.push_back({stats.experts.hits, stats.experts.misses, stats.experts.evictions, stats.experts.unplaced});
  }
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_EQ(runs[0], runs[2]);
  EXPECT_GT(runs[0][3], 0u);
}

TEST(Loader, AnExpertThatIsNotThereIsRefusedBeforeAnythingIsRead) {
  const auto model = make_test_model({3000}, 8, DirectMode::kOff);
  auto loader = make_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_all);
  for (const uint32_t expert : {8u, 0xffffffffu, 0x7fffffffu}) {
    const Status status = loader->start(1, std::vector<uint32_t>{0, expert});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::kBadArgument);
    EXPECT_NE(status.error().message().find("layer 1"), std::string::npos);
  }
  EngineStats stats;
  loader->add_stats(stats);
  EXPECT_EQ(stats.io_reads, 0u);
  EXPECT_EQ(*run_demand(*loader, *model, 0, {0, 1}), 2u);
}

// 10,000 seeded schedules of a device that delays, reorders, cuts short and fails: exact bytes or an error, never a
// slot with wrong bytes, never a hang, and after an error the next demand works.
TEST(LoaderFaults, ExactBytesOrAnError) {
  const auto model = make_test_model({1500, 2500}, 12, DirectMode::kOff);
  const SlotPlan layout = plan_layout(model->sources, 2);
  uint64_t failures = 0;
  uint64_t successes = 0;
  for (uint64_t seed = 0; seed < 10'000; ++seed) {
    auto device = std::make_unique<FaultDevice>(
        std::make_unique<MemoryDevice>(), FaultOptions{.seed = seed, .delay = 0.3, .reorder = 0.5, .cut_short = 0.02, .fail = 0.03});
    auto loader = make_loader(*model, std::move(device), layout.bytes_min);
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int step = 0; step < 6; ++step) {
      std::vector<uint32_t> experts(12);
      std::iota(experts.begin(), experts.end(), 0u);
      std::shuffle(experts.begin(), experts.end(), random);
      experts.resize(1 + random() % 6);
      const auto count = run_demand(*loader, *model, random() % 2, experts);
      if (count.ok()) {
        ++successes;
        ASSERT_EQ(*count, experts.size());
      } else {
        ++failures;
        ASSERT_TRUE(count.error().code == ErrorCode::kDeviceError || count.error().code == ErrorCode::kShortRead);
        ASSERT_NE(count.error().text.find("expert"), std::string::npos);
      }
      ASSERT_EQ(loader->pool().n_pinned(), 0u);
    }
  }
  EXPECT_GT(failures, 1000u);
  EXPECT_GT(successes, 10'000u);
}

TEST(LoaderFaults, VerifyingFindsCorruptedBytes) {
  const auto model = make_test_model({1500}, 12, DirectMode::kOff);
  auto device = std::make_unique<FaultDevice>(std::make_unique<MemoryDevice>(), FaultOptions{.seed = 5, .corrupt = 1.0});
  auto loader = make_loader(*model, std::move(device), plan_layout(model->sources, 2).bytes_all, true);
  ASSERT_TRUE(loader->start(1, std::vector<uint32_t>{3}).ok());
  const auto ready = loader->next();
  ASSERT_FALSE(ready.ok());
  EXPECT_EQ(ready.error().code, ErrorCode::kBadFile);
  EXPECT_NE(ready.error().message().find("expert 3"), std::string::npos);
  loader->end();
}

TEST(Loader, AFileThatIsRewrittenIsNoticed) {
  const auto model = make_test_model({1500}, 12, DirectMode::kOff);
  auto loader = make_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_all);
  ASSERT_EQ(*run_demand(*loader, *model, 0, {0, 1}), 2u);
  std::filesystem::resize_file(model->path, model->bytes.size() / 2);
  const auto count = run_demand(*loader, *model, 0, {2});
  ASSERT_FALSE(count.ok());
  EXPECT_EQ(count.error().code, ErrorCode::kChanged);
  EXPECT_TRUE(run_demand(*loader, *model, 0, {0, 1}).ok()) << "what is resident stays usable";
}

// Guards against text from another model's bytes: the check before the reads cannot see what happens during them.
TEST(Loader, AFileThatIsRewrittenWhileItIsReadIsNoticed) {
  const auto model = make_test_model({1500}, 12, DirectMode::kOff);
  auto loader = make_loader(*model, std::make_unique<MemoryDevice>(1), plan_layout(model->sources, 2).bytes_all);
  const std::vector<uint32_t> experts = {0, 1, 2, 3};
  ASSERT_TRUE(loader->start(model->sources[0].layer, experts).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // for another time of modification
  std::fstream(model->path, std::ios::in | std::ios::out | std::ios::binary).seekp(1000).put('x');
  Result<std::span<const ReadyExpert>> ready = loader->next();
  while (ready.ok() && !ready->empty()) ready = loader->next();
  loader->end();
  ASSERT_FALSE(ready.ok());
  EXPECT_EQ(ready.error().code, ErrorCode::kChanged);
  const auto again = run_demand(*loader, *model, 0, {0, 1});
  ASSERT_FALSE(again.ok()) << "slots that may hold the new bytes are used";
  EXPECT_EQ(again.error().code, ErrorCode::kChanged);
}

// A tree with nothing but /proc/meminfo, whose number a test can change.
class MadeUpMachine {
 public:
  MadeUpMachine() : root_(std::filesystem::temp_directory_path() / ("sluice-machine-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(root_ / "proc");
  }
  ~MadeUpMachine() { std::filesystem::remove_all(root_); }
  void set_available(uint64_t bytes) { std::ofstream(root_ / "proc/meminfo") << "MemAvailable: " << bytes / 1024 << " kB\n"; }
  std::string root() const { return root_; }

 private:
  std::filesystem::path root_;
};

TEST(Loader, GivesMemoryBackWhileItRunsAndStaysExact) {
  const auto model = make_test_model({200000, 200000}, 24, DirectMode::kAuto);
  const SlotPlan layout = plan_layout(model->sources, 2);
  MadeUpMachine machine;
  machine.set_available(kGiB);
  auto created = Loader::create(model->sources, real_device(),
                                {.budget_bytes = layout.bytes_all, .top_k = 2, .fit = true, .memory_root = machine.root(), .poison_released_slots = true});
  ASSERT_TRUE(created.ok()) << created.error().message();
  Loader& loader = **created;
  std::mt19937 random(3);
  const auto run_passes = [&](int n) {
    for (int pass = 0; pass < n; ++pass) {
      for (size_t source = 0; source < model->sources.size(); ++source) {
        std::vector<uint32_t> experts(24);
        std::iota(experts.begin(), experts.end(), 0u);
        std::shuffle(experts.begin(), experts.end(), random);
        experts.resize(6);
        ASSERT_EQ(*run_demand(loader, *model, source, experts), 6u);
      }
    }
  };
  const auto wait_for_a_look = [] { std::this_thread::sleep_for(std::chrono::nanoseconds(GovernorOptions::kLookIntervalNs)); };
  run_passes(20);
  EXPECT_EQ(loader.pool().usable_bytes(), loader.pool().bytes());
  machine.set_available(30 * kMiB);  // below the reserve of 32 MiB: 18 MiB are missing to one and a half
  wait_for_a_look();
  run_passes(20);
  EXPECT_LT(loader.pool().usable_bytes(), loader.pool().bytes() - 17 * kMiB);
  machine.set_available(0);
  wait_for_a_look();
  run_passes(20);
  EXPECT_EQ(loader.pool().usable_bytes(), loader.pool().bytes_min());
  EngineStats stats;
  loader.add_stats(stats);
  EXPECT_EQ(stats.pool_shrinks, 2u);
  EXPECT_GT(stats.experts.unplaced, 0u) << "six experts and the smallest pool";
  EXPECT_EQ(*loader.verify_all_slots(), 0u);
}

TEST(Loader, APoolBelowOneTokensWorkingSetTakesAPolicyThatHits) {
  const auto model = make_test_model({200000, 200000, 200000}, 24, DirectMode::kAuto);
  const SlotPlan layout = plan_layout(model->sources, 2);
  for (const uint64_t n_slot : {2u, 5u, 6u}) {
    auto loader = Loader::create(model->sources, real_device(),
                                 {.budget_bytes = layout.bytes_min + (n_slot - 2) * layout.classes[0].slot_bytes, .top_k = 2, .policy = PolicyKind::kLru});
    ASSERT_TRUE(loader.ok()) << loader.error().message();
    EXPECT_EQ((*loader)->pool().n_slot(), n_slot);
    EXPECT_EQ((*loader)->policy(), n_slot < 6 ? PolicyKind::kLfru : PolicyKind::kLru);
  }
}

}  // namespace
}  // namespace sluice
