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
  bool pack_like = false;

  std::unique_ptr<TestModel> make(uint32_t n_expert) const {
    return pack_like ? make_pack_like_model(slab_bytes, n_expert, mode) : make_test_model(slab_bytes, n_expert, mode);
  }
};

class LoaderShapes : public testing::TestWithParam<Shape> {};

TEST_P(LoaderShapes, HandsOutExactBytesAtEveryBudget) {
  const auto model = GetParam().make(24);
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
    // Where the largest number of staging buffers is most of a budget, less than all of it holds all experts.
    const bool all_fit = loader->pool().n_slot() == 24 * model->sources.size();
    EXPECT_TRUE(all_fit || share < 1.0);
    EXPECT_TRUE(!all_fit || share > 0.0);
    if (!all_fit) {
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
                                         Shape{"buffered", {3000, 70001}, DirectMode::kOff},
                                         Shape{"pack_staged", {1900, 3000}, DirectMode::kAuto, true},
                                         Shape{"pack_in_place", {200000, 120003}, DirectMode::kAuto, true},
                                         Shape{"pack_buffered", {3000, 70001}, DirectMode::kOff, true}),
                         [](const auto& test) { return test.param.name; });

TEST(Loader, APacksExpertIsOneRead) {
  for (const bool pack_like : {false, true}) {
    const auto model = Shape{"", {3000, 70001}, DirectMode::kAuto, pack_like}.make(24);
    auto loader = make_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_all);
    for (size_t source : {0, 1}) ASSERT_EQ(*run_demand(*loader, *model, source, {3, 5, 7, 23}), 4u);
    EngineStats stats;
    loader->add_stats(stats);
    EXPECT_EQ(stats.io_reads, stats.experts.misses * (pack_like ? 1 : 3));
  }
}

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

Result<std::unique_ptr<Loader>> make_verifying_loader(const TestModel& model, std::unique_ptr<Device> device, uint64_t budget_bytes) {
  return Loader::create(model.sources, std::move(device),
                        {.budget_bytes = budget_bytes, .top_k = 2, .verify_reads = true, .poison_released_slots = true});
}

TEST(LoaderVerifyReads, AFlippedByteIsAnErrorAndTheSlotIsNotKept) {
  for (const std::vector<uint64_t>& slab_bytes : {std::vector<uint64_t>{1900}, {200000}}) {
    for (const size_t matrix : {0u, 1u, 2u}) {
      const auto model = make_pack_like_model(slab_bytes, 12, DirectMode::kAuto);
      LayerSource& source = model->sources[0];
      const uint64_t offset = source.slab_offset(source.matrices[matrix], 3);
      {
        std::fstream stream(model->path, std::ios::binary | std::ios::in | std::ios::out);
        stream.seekp(static_cast<std::streamoff>(offset + 100));
        stream.put(static_cast<char>(model->bytes[offset + 100] ^ 1));
      }
      source.spans[0].file = *File::open(model->path, DirectMode::kAuto);
      auto loader = std::move(make_verifying_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_all)).value();
      ASSERT_EQ(*run_demand(*loader, *model, 0, {0, 1}), 2u);
      for (int again = 0; again < 2; ++again) {  // not kept: the second time it is read again
        const auto count = run_demand(*loader, *model, 0, {3});
        ASSERT_FALSE(count.ok());
        EXPECT_EQ(count.error().code, ErrorCode::kBadFile);
        const std::string text = count.error().message();
        for (const std::string& word : {model->path, fmt::format("bytes at {} ", offset), fmt::format("({})", matrix_role_name(source.matrices[matrix].role)),
                                        std::string("layer 1 expert 3"), std::string("checksum")}) {
          EXPECT_NE(text.find(word), std::string::npos) << text << " does not name " << word;
        }
        EXPECT_EQ(text.find('\n'), std::string::npos);
        EXPECT_EQ(loader->pool().n_pinned(), 0u);
        EXPECT_FALSE(loader->pool().find({1, 3}).has_value());
      }
      EXPECT_EQ(*run_demand(*loader, *model, 0, {0, 1, 2, 4}), 4u);
      EngineStats stats;
      loader->add_stats(stats);
      EXPECT_EQ(stats.verified_reads, 4u);
    }
  }
}

// A drive that lies, at the smallest budget: whatever is handed out is right.
TEST(LoaderVerifyReads, WrongBytesAreNeverHandedOut) {
  const auto model = make_pack_like_model({1500, 2500}, 12, DirectMode::kOff);
  uint64_t failures = 0;
  uint64_t successes = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    auto device = std::make_unique<FaultDevice>(std::make_unique<MemoryDevice>(),
                                                FaultOptions{.seed = seed, .delay = 0.3, .reorder = 0.5, .corrupt = 0.05});
    auto loader = std::move(make_verifying_loader(*model, std::move(device), plan_layout(model->sources, 2).bytes_min)).value();
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int step = 0; step < 6; ++step) {
      std::vector<uint32_t> experts(12);
      std::iota(experts.begin(), experts.end(), 0u);
      std::shuffle(experts.begin(), experts.end(), random);
      experts.resize(1 + random() % 6);
      const auto count = run_demand(*loader, *model, random() % 2, experts);
      count.ok() ? ++successes : ++failures;
      if (!count.ok()) {
        ASSERT_EQ(count.error().code, ErrorCode::kBadFile) << count.error().message();
      }
    }
  }
  EXPECT_GT(failures, 100u);
  EXPECT_GT(successes, 1000u);
}

TEST(LoaderVerifyReads, AFileWithoutChecksumsIsRefused) {
  const auto model = make_test_model({1500}, 12, DirectMode::kOff);
  const auto loader = make_verifying_loader(*model, real_device(), plan_layout(model->sources, 2).bytes_all);
  ASSERT_FALSE(loader.ok());
  EXPECT_EQ(loader.error().code, ErrorCode::kBadArgument);
  EXPECT_NE(loader.error().message().find("no checksums"), std::string::npos);
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
