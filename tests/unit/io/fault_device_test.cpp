// The lying device keeps the contract: over thousands of seeded schedules each read ends once, in exact bytes or an
// error, and no wait hangs.
#include "io/fault_device.h"

#include <cerrno>
#include <map>
#include <random>

#include "io/memory_device.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr uint64_t kFileBytes = 64 * kKiB + 777;
constexpr uint64_t kReadBytesMax = 4 * kKiB;

class FaultDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    write_pattern(folder_.path_of("f"), 0, kFileBytes);
    file_ = open_file(folder_.path_of("f"), DirectMode::kOff);
    uring_works_ = open_device({.path = IoPath::kUring}).ok();
  }

  std::unique_ptr<Device> make_inner(uint64_t seed) const {
    if (seed % 8 == 7) return std::move(open_device({.path = IoPath::kPread, .depth = 2})).value();
    if (seed % 8 == 6 && uring_works_) return std::move(open_device({.path = IoPath::kUring, .depth = 2})).value();
    return std::make_unique<MemoryDevice>(1 + seed % 5);
  }

  // What one schedule came to.
  struct Run {
    std::vector<std::pair<uint64_t, bool>> order;  // tag and whether the read was ok, as delivered
    uint64_t wrong = 0;                            // reads that were ok with wrong bytes
    FaultCounts faults;
  };

  // A seeded mix of submit, cancel, raise, poll and wait, checked against what is known to be outstanding.
  Run run_schedule(uint64_t seed, const FaultOptions& options, std::unique_ptr<Device> inner) {
    std::mt19937_64 random(seed * 31 + 5);
    constexpr uint64_t kReads = 24;
    std::vector<AlignedBytes> memory(kReads);
    std::map<uint64_t, ReadRequest> outstanding;
    std::vector<ReadCompletion> completions;
    Run run;
    FaultDevice device(std::move(inner), options);
    const auto check_delivered = [&] {
      for (const ReadCompletion& completion : completions) {
        const auto entry = outstanding.find(completion.tag);
        ASSERT_NE(entry, outstanding.end()) << "seed " << seed << " read " << completion.tag;
        const ReadRequest& request = entry->second;
        if (completion.status.ok()) {
          const uint64_t end = request.offset + request.bytes_needed;
          if (first_wrong_offset(request.destination, request.offset, request.bytes_needed) != end) ++run.wrong;
        } else {
          const ErrorCode code = completion.status.error().code;
          ASSERT_TRUE(code == ErrorCode::kShortRead || code == ErrorCode::kDeviceError) << "seed " << seed;
        }
        run.order.emplace_back(completion.tag, completion.status.ok());
        outstanding.erase(entry);
      }
      completions.clear();
      ASSERT_EQ(device.pending(), outstanding.size()) << "seed " << seed;
    };

    uint64_t submitted = 0;
    while (submitted < kReads || !outstanding.empty()) {
      const uint64_t action = random() % 8;
      const uint64_t tag = random() % kReads;
      if (submitted < kReads && action < 4) {
        const uint64_t offset = random() % (kFileBytes - kReadBytesMax);
        const uint64_t bytes = 1 + random() % kReadBytesMax;
        memory[submitted] = aligned_bytes(kReadBytesMax);
        const ReadRequest request = {.file = file_.get(),
                                     .offset = offset,
                                     .bytes = bytes,
                                     .bytes_needed = 1 + random() % bytes,
                                     .destination = memory[submitted].get(),
                                     .tag = submitted,
                                     .priority = random() % 2 == 0 ? ReadPriority::kDemand : ReadPriority::kPrefetch};
        device.submit(request);
        outstanding.emplace(submitted++, request);
      } else if (action == 4) {
        const bool was_outstanding = outstanding.contains(tag);
        if (device.cancel(tag)) {
          EXPECT_TRUE(was_outstanding) << "seed " << seed;
          outstanding.erase(tag);
        }
      } else if (action == 5) {
        device.raise(tag);
      } else if (action == 6) {
        device.poll(completions);
        check_delivered();
      } else {
        const bool any = !outstanding.empty();
        device.wait(completions);
        EXPECT_EQ(!completions.empty(), any) << "seed " << seed << ": wait brings something when it can";
        check_delivered();
      }
      if (HasFatalFailure()) break;
    }
    run.faults = device.fault_counts();
    return run;
  }

  TempFolder folder_;
  std::shared_ptr<const File> file_;
  bool uring_works_ = false;
};

TEST_F(FaultDeviceTest, EveryReadIsExactOrAnErrorOverTwoThousandSchedules) {
  FaultCounts total;
  size_t ok = 0;
  size_t failed = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const FaultOptions options = {
        .seed = seed, .delay = 0.3, .reorder = 0.5, .cut_short = 0.1, .fail = 0.1, .delay_calls_max = 6};
    const Run run = run_schedule(seed, options, make_inner(seed));
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    ASSERT_EQ(run.wrong, 0u) << "seed " << seed;
    const auto ok_count = static_cast<size_t>(
        std::count_if(run.order.begin(), run.order.end(), [](const auto& read) { return read.second; }));
    ASSERT_EQ(run.order.size() - ok_count, run.faults.failed + run.faults.cut_short) << "seed " << seed;
    ok += ok_count;
    failed += run.order.size() - ok_count;
    total.delayed += run.faults.delayed;
    total.reordered += run.faults.reordered;
    total.cut_short += run.faults.cut_short;
    total.failed += run.faults.failed;
  }
  // Each fault really happened, about as often as asked.
  EXPECT_GT(ok, 20000u);
  EXPECT_NEAR(static_cast<double>(failed) / static_cast<double>(ok + failed), 0.19, 0.02);
  EXPECT_NEAR(static_cast<double>(total.delayed) / static_cast<double>(ok + failed), 0.3, 0.02);
  EXPECT_GT(total.reordered, 500u);
  EXPECT_GT(total.cut_short, 2000u);
  EXPECT_GT(total.failed, 2000u);
}

TEST_F(FaultDeviceTest, CorruptionIsCountedAndHitsWhatIsNeeded) {
  uint64_t corrupted = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Run run = run_schedule(seed, {.seed = seed, .corrupt = 0.2}, std::make_unique<MemoryDevice>());
    ASSERT_EQ(run.wrong, run.faults.corrupted) << "seed " << seed;
    corrupted += run.faults.corrupted;
  }
  EXPECT_GT(corrupted, 100u);
}

TEST_F(FaultDeviceTest, TheSameSeedGivesTheSameSchedule) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const FaultOptions options = {.seed = seed, .delay = 0.5, .reorder = 0.5, .cut_short = 0.1, .fail = 0.1};
    const Run first = run_schedule(seed, options, std::make_unique<MemoryDevice>(3));
    const Run second = run_schedule(seed, options, std::make_unique<MemoryDevice>(3));
    ASSERT_EQ(first.order, second.order) << "seed " << seed;
  }
}

TEST_F(FaultDeviceTest, WithoutFaultsItOnlyPassesThrough) {
  const Run run = run_schedule(3, {.seed = 3}, std::make_unique<MemoryDevice>());
  EXPECT_EQ(run.wrong, 0u);
  for (const auto& read : run.order) EXPECT_TRUE(read.second);
  EXPECT_EQ(run.faults.delayed + run.faults.reordered + run.faults.failed + run.faults.cut_short, 0u);
}

TEST_F(FaultDeviceTest, FailedReadsAreCountedAndOverwritten) {
  FaultDevice device(std::make_unique<MemoryDevice>(), {.seed = 1, .fail = 1});
  EXPECT_EQ(device.name(), "fault(memory)");
  std::vector<std::byte> data(1000);
  device.submit({.file = file_.get(), .offset = 0, .bytes = 1000, .bytes_needed = 1000, .destination = data.data()});
  const auto completions = drain(device);
  ASSERT_EQ(completions.size(), 1u);
  ASSERT_FALSE(completions[0].status.ok());
  EXPECT_EQ(completions[0].status.error().system_error, EIO);
  EXPECT_EQ(device.stats().errors, 1u);
  EXPECT_EQ(device.stats().reads, 1u);
  EXPECT_LT(first_wrong_offset(data.data(), 0, 1000), 1000u);
}

TEST_F(FaultDeviceTest, ReorderingChangesTheOrder) {
  FaultDevice device(std::make_unique<MemoryDevice>(), {.seed = 1, .reorder = 1});
  std::vector<std::byte> data(4);
  for (uint64_t tag = 0; tag < 4; ++tag) {
    device.submit(
        {.file = file_.get(), .offset = tag, .bytes = 1, .bytes_needed = 1, .destination = &data[tag], .tag = tag});
  }
  const auto completions = drain(device);
  ASSERT_EQ(completions.size(), 4u);
  EXPECT_NE(completions[0].tag, 0u);
  EXPECT_EQ(device.fault_counts().reordered, 1u);
}

}  // namespace
}  // namespace sluice
