// Copies on several drives: reads follow the measured speed, a drive that fails or whose copy changes is left, and the
// bytes are exact or there is an error.
#include "io/mirror_device.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "io/fault_device.h"
#include "io/memory_device.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr uint64_t kFileBytes = 2 * kMiB;
constexpr uint64_t kReadBytes = 64 * kKiB;

// Drives of given speeds behind one device: each file's reads take their time one after the other. Files may be made to
// fail. The bytes come through a MemoryDevice.
class PacedDevice : public Device {
 public:
  void set_read_ns(const File& file, int64_t ns) { read_ns_[&file] = ns; }
  void let_fail(const File& file) { failing_.insert(&file); }
  void mend(const File& file) { failing_.erase(&file); }
  uint64_t reads_of(const File& file) const {
    const auto entry = reads_.find(&file);
    return entry == reads_.end() ? 0 : entry->second;
  }

  void submit(const ReadRequest& request) override {
    const int64_t now = now_ns();
    int64_t& free_ns = free_ns_[request.file];
    free_ns = std::max(free_ns, now) + read_ns_[request.file];
    waiting_.push_back({request, free_ns});
    ++reads_[request.file];
  }
  bool cancel(uint64_t tag) override {
    return std::erase_if(waiting_, [tag](const Waiting& waiting) { return waiting.request.tag == tag; }) > 0;
  }
  void raise(uint64_t) override {}
  void poll(std::vector<ReadCompletion>& completions) override {
    const int64_t now = now_ns();
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      if (it->due_ns > now) {
        ++it;
        continue;
      }
      const ReadRequest request = it->request;
      it = waiting_.erase(it);
      if (failing_.contains(request.file)) {
        completions.push_back(
            {request.tag, make_system_error(ErrorCode::kDeviceError, EIO, "cannot read '{}'", request.file->path()),
             0});
      } else {
        memory_.submit(request);
        memory_.poll(completions);
      }
    }
  }
  void wait(std::vector<ReadCompletion>& completions) override {
    const size_t count_before = completions.size();
    while (completions.size() == count_before && !waiting_.empty()) {
      int64_t due_ns = INT64_MAX;
      for (const Waiting& waiting : waiting_) due_ns = std::min(due_ns, waiting.due_ns);
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::max<int64_t>(due_ns - now_ns(), 0)));
      poll(completions);
    }
  }
  size_t pending() const override { return waiting_.size(); }
  DeviceStats stats() const override { return memory_.stats(); }
  std::string name() const override { return "paced"; }

 private:
  struct Waiting {
    ReadRequest request;
    int64_t due_ns = 0;
  };
  std::map<const File*, int64_t> read_ns_;
  std::map<const File*, int64_t> free_ns_;
  std::map<const File*, uint64_t> reads_;
  std::set<const File*> failing_;
  std::vector<Waiting> waiting_;
  MemoryDevice memory_;
};

class MirrorDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(folder_.path_of("copy"));
    for (const char* name : {"f", "copy/f"}) write_pattern(folder_.path_of(name), 0, kFileBytes);
    primary_ = open_file(folder_.path_of("f"), DirectMode::kOff);
    copy_ = open_file(folder_.path_of("copy/f"), DirectMode::kOff);
  }

  std::unique_ptr<MirrorDevice> make_mirror(std::unique_ptr<Device> inner) const {
    return std::make_unique<MirrorDevice>(std::move(inner), std::vector<std::string>{"first", "second"},
                                          std::vector<MirroredFile>{{primary_, {copy_}}});
  }

  ReadRequest request(uint64_t tag) const {
    const uint64_t offset = tag % (kFileBytes / kReadBytes) * kReadBytes;
    return {.file = primary_.get(),
            .offset = offset,
            .bytes = kReadBytes,
            .bytes_needed = kReadBytes,
            .destination = memory_.get() + tag % kSlots * kReadBytes,
            .tag = tag};
  }

  bool is_exact(uint64_t tag) const {
    const ReadRequest read = request(tag);
    return first_wrong_offset(read.destination, read.offset, kReadBytes) == read.offset + kReadBytes;
  }

  // `count` reads, kSlots under way at once; how many failed. Those that did not must be exact.
  uint64_t run(Device& device, uint64_t count) {
    uint64_t next = 0;
    uint64_t failed = 0;
    uint64_t done = 0;
    const uint64_t first_tag = tags_;
    while (next < std::min<uint64_t>(kSlots, count)) device.submit(request(first_tag + next++));
    std::vector<ReadCompletion> completions;
    while (device.pending() > 0) {
      completions.clear();
      device.wait(completions);
      for (const ReadCompletion& completion : completions) {
        ++done;
        if (!completion.status.ok()) {
          ++failed;
        } else {
          EXPECT_TRUE(is_exact(completion.tag)) << completion.tag;
        }
        // The slot that came free: tags are equal modulo kSlots.
        const uint64_t follower = completion.tag + kSlots;
        if (follower < first_tag + count) {
          device.submit(request(follower));
          ++next;
        }
      }
    }
    EXPECT_EQ(done, count);
    tags_ = align_up(first_tag + count, kSlots);
    return failed;
  }

  static constexpr uint64_t kSlots = 8;
  TempFolder folder_;
  std::shared_ptr<const File> primary_;
  std::shared_ptr<const File> copy_;
  AlignedBytes memory_ = aligned_bytes(kSlots * kReadBytes);
  uint64_t tags_ = 0;
};

// Guards against halving the reads: the slower drive would then set the pace for both.
TEST_F(MirrorDeviceTest, ReadsSpreadByMeasuredSpeed) {
  auto paced = std::make_unique<PacedDevice>();
  PacedDevice& drives = *paced;
  drives.set_read_ns(*primary_, 4'000'000);
  drives.set_read_ns(*copy_, 1'000'000);
  const auto mirror = make_mirror(std::move(paced));
  EXPECT_EQ(run(*mirror, 200), 0u);
  const auto slow = static_cast<double>(drives.reads_of(*primary_));
  EXPECT_EQ(drives.reads_of(*primary_) + drives.reads_of(*copy_), 200u);
  EXPECT_GT(slow, 200 * 0.08);
  EXPECT_LT(slow, 200 * 0.35);
  const auto stats = mirror->drive_stats();
  ASSERT_EQ(stats.size(), 2u);
  EXPECT_EQ(stats[0].reads, drives.reads_of(*primary_));
  EXPECT_EQ(stats[1].bytes, drives.reads_of(*copy_) * kReadBytes);
  EXPECT_GT(stats[1].mb_per_s, 1.5 * stats[0].mb_per_s);
}

// Guards against a measure that is kept for ever: a drive that was slow once comes back into use.
TEST_F(MirrorDeviceTest, ADriveThatBecomesFastIsFoundOut) {
  auto paced = std::make_unique<PacedDevice>();
  PacedDevice& drives = *paced;
  drives.set_read_ns(*primary_, 1'000'000);
  drives.set_read_ns(*copy_, 20'000'000);
  const auto mirror = make_mirror(std::move(paced));
  EXPECT_EQ(run(*mirror, 100), 0u);
  drives.set_read_ns(*copy_, 100'000);
  std::this_thread::sleep_for(std::chrono::nanoseconds(MirrorDevice::kRetryNs));
  const uint64_t before = drives.reads_of(*copy_);
  EXPECT_EQ(run(*mirror, 1000), 0u);
  EXPECT_GT(drives.reads_of(*copy_) - before, 300u);
}

// Guards against a broken second drive that spoils the run, and against one line per failed read.
TEST_F(MirrorDeviceTest, AFailingDriveIsLeftAndNoReadIsLost) {
  for (const bool first_fails : {true, false}) {
    auto paced = std::make_unique<PacedDevice>();
    PacedDevice& drives = *paced;
    const File& broken = first_fails ? *primary_ : *copy_;
    drives.let_fail(broken);
    const auto mirror = make_mirror(std::move(paced));
    testing::internal::CaptureStderr();
    EXPECT_EQ(run(*mirror, 100), 0u);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_NE(said.find(first_fails ? "'first'" : "'second'"), std::string::npos) << said;
    EXPECT_NE(said.find("1 of 2 drives"), std::string::npos) << said;
    const DriveStats stats = mirror->drive_stats()[first_fails ? 0 : 1];
    EXPECT_TRUE(stats.dropped);
    EXPECT_GE(stats.errors, MirrorDevice::kFailuresMax);
    EXPECT_LE(stats.errors, MirrorDevice::kFailuresMax + kSlots);
    EXPECT_EQ(mirror->stats().errors, 0u);
    EXPECT_EQ(mirror->stats().retries, stats.errors);
    EXPECT_EQ(drives.reads_of(broken), stats.errors);
  }
}

// The only way to an error: every drive failed this read. Later ones go on.
TEST_F(MirrorDeviceTest, AnErrorOnlyWhenAllDrivesFail) {
  auto paced = std::make_unique<PacedDevice>();
  PacedDevice& drives = *paced;
  drives.let_fail(*primary_);
  drives.let_fail(*copy_);
  const auto mirror = make_mirror(std::move(paced));
  mirror->submit(request(0));
  const auto completions = drain(*mirror);
  ASSERT_EQ(completions.size(), 1u);
  ASSERT_FALSE(completions[0].status.ok());
  EXPECT_EQ(completions[0].status.error().system_error, EIO);
  EXPECT_EQ(mirror->stats().errors, 1u);
  drives.mend(*primary_);
  drives.mend(*copy_);
  EXPECT_EQ(run(*mirror, 50), 0u);
  EXPECT_EQ(mirror->stats().errors, 1u);
}

TEST_F(MirrorDeviceTest, RandomFaultsGiveExactBytesOrAnError) {
  uint64_t repeated = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    auto faults = std::make_unique<FaultDevice>(
        std::make_unique<MemoryDevice>(3),
        FaultOptions{.seed = seed, .delay = 0.3, .reorder = 0.5, .cut_short = 0.05, .fail = 0.1});
    const auto mirror = make_mirror(std::move(faults));
    set_log_level(LogLevel::kError);
    const uint64_t failed = run(*mirror, 60);
    set_log_level(LogLevel::kInfo);
    EXPECT_EQ(mirror->stats().errors, failed);
    EXPECT_EQ(mirror->stats().reads, 60u);
    repeated += mirror->stats().retries;
  }
  EXPECT_GT(repeated, 100u);
}

// Guards against wrong bytes from a copy that somebody overwrites while the model runs.
TEST_F(MirrorDeviceTest, ACopyThatIsRewrittenOrCutIsLeft) {
  for (const bool cut : {false, true}) {
    const std::string path = folder_.path_of("copy/f");
    std::filesystem::remove(path);
    write_pattern(path, 0, kFileBytes);
    copy_ = open_file(path, DirectMode::kOff);
    const auto mirror = make_mirror(std::make_unique<MemoryDevice>());
    EXPECT_EQ(run(*mirror, 50), 0u);
    EXPECT_GT(mirror->drive_stats()[1].reads, 0u);
    // A clock tick later, so that the time of modification differs.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (cut) {
      std::filesystem::resize_file(path, kFileBytes / 2);
    } else {
      write_pattern(path, 0, kFileBytes, 9);
    }
    testing::internal::CaptureStderr();
    EXPECT_EQ(run(*mirror, 50), 0u);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_TRUE(mirror->drive_stats()[1].dropped);
    EXPECT_EQ(mirror->drive_stats()[1].errors, 0u);
  }
}

// The check before a read cannot see what happens during it.
TEST_F(MirrorDeviceTest, ACopyThatIsRewrittenWhileItIsReadGivesNoBytes) {
  auto paced = std::make_unique<PacedDevice>();
  PacedDevice& drives = *paced;
  drives.set_read_ns(*primary_, 1'000'000);
  drives.set_read_ns(*copy_, 60'000'000);
  const auto mirror = make_mirror(std::move(paced));
  for (uint64_t tag = 0; tag < kSlots; ++tag) mirror->submit(request(tag));
  EXPECT_GT(drives.reads_of(*copy_), 0u);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  write_pattern(folder_.path_of("copy/f"), 0, kFileBytes, 9);
  const auto completions = drain(*mirror);
  ASSERT_EQ(completions.size(), kSlots);
  for (const ReadCompletion& completion : completions) {
    ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
    EXPECT_TRUE(is_exact(completion.tag)) << completion.tag;
  }
  EXPECT_TRUE(mirror->drive_stats()[1].dropped);
}

TEST_F(MirrorDeviceTest, CancelledReadsLeaveTheQueueEmpty) {
  const auto mirror = make_mirror(std::make_unique<MemoryDevice>());
  for (uint64_t tag = 0; tag < kSlots; ++tag) mirror->submit(request(tag));
  for (uint64_t tag = 0; tag < kSlots; ++tag) EXPECT_TRUE(mirror->cancel(tag));
  EXPECT_FALSE(mirror->cancel(0));
  EXPECT_EQ(mirror->pending(), 0u);
  EXPECT_EQ(run(*mirror, 50), 0u);
}

TEST_F(MirrorDeviceTest, AFileWithoutCopiesIsReadWhereItIs) {
  write_pattern(folder_.path_of("alone"), 0, kFileBytes, 3);
  const auto alone = open_file(folder_.path_of("alone"), DirectMode::kOff);
  const auto mirror = make_mirror(std::make_unique<MemoryDevice>());
  ReadRequest read = request(0);
  read.file = alone.get();
  mirror->submit(read);
  ASSERT_EQ(drain(*mirror).size(), 1u);
  EXPECT_EQ(first_wrong_offset(read.destination, 0, kReadBytes, 3), kReadBytes);
}

}  // namespace
}  // namespace sluice
