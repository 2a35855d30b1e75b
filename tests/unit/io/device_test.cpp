// Every promise of io/device.h, for each real path with and without direct I/O, and for the memory device.
#include "io/device.h"

#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <random>
#include <set>
#include <thread>

#include "io/memory_device.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

enum class Kind { kUring, kPread, kMemory };

struct Setup {
  Kind kind;
  DirectMode mode;
};

std::string setup_name(const testing::TestParamInfo<Setup>& info) {
  const char* kind = info.param.kind == Kind::kUring ? "uring" : info.param.kind == Kind::kPread ? "pread" : "memory";
  return fmt::format("{}_{}", kind, info.param.mode == DirectMode::kOff ? "buffered" : "direct");
}

class DeviceTest : public testing::TestWithParam<Setup> {
 protected:
  static constexpr uint64_t kFileBytes = 3 * kMiB + 1234;

  void SetUp() override {
    if (GetParam().kind == Kind::kUring && !open_device({.path = IoPath::kUring}).ok()) {
      GTEST_SKIP() << open_device({.path = IoPath::kUring}).error().message();
    }
    write_pattern(folder_.path_of("f"), 0, kFileBytes);
    if (GetParam().mode == DirectMode::kRequire && !File::open(folder_.path_of("f"), DirectMode::kRequire).ok()) {
      GTEST_SKIP() << "no direct I/O in " << folder_.path();
    }
    file_ = open_file(folder_.path_of("f"), GetParam().mode);
  }

  std::unique_ptr<Device> make_device(unsigned depth) const {
    if (GetParam().kind == Kind::kMemory) return std::make_unique<MemoryDevice>(depth);
    const IoPath path = GetParam().kind == Kind::kUring ? IoPath::kUring : IoPath::kPread;
    auto device = open_device({.path = path, .depth = depth});
    SLUICE_ASSERT(device.ok(), "{}", device.error().message());
    return std::move(device).value();
  }

  // One read that is alone on its device.
  static ReadCompletion read_alone(Device& device, const ReadRequest& request) {
    device.submit(request);
    EXPECT_EQ(device.pending(), 1u);
    const auto completions = drain(device);
    EXPECT_EQ(completions.size(), 1u);
    return completions.empty() ? ReadCompletion{} : completions.front();
  }

  // The descriptor of `file_` becomes another one, as if the drive below had changed its mind.
  void swap_descriptor(const char* path, int flags) const {
    const int other = ::open(path, flags | O_CLOEXEC);
    ASSERT_GE(other, 0) << path;
    ASSERT_EQ(::dup2(other, file_->fd()), file_->fd());
    ::close(other);
  }

  TempFolder folder_;
  std::shared_ptr<const File> file_;
};

TEST_P(DeviceTest, ExactBytesAtRandomPlaces) {
  const auto device = make_device(8);
  const uint64_t align = std::max<uint64_t>(file_->align_bytes(), 1);
  std::mt19937_64 random(1);
  constexpr uint64_t kReads = 300;
  std::vector<AlignedBytes> memory(kReads);
  std::vector<ReadRequest> requests;
  uint64_t bytes_total = 0;
  for (uint64_t tag = 0; tag < kReads; ++tag) {
    const uint64_t offset = align_down(random() % (kFileBytes - align), align);
    const uint64_t bytes_there = kFileBytes - offset;
    // Every tenth read takes all to the end of the file and past it, to the end of the block.
    const uint64_t needed = tag % 10 == 0 ? bytes_there : 1 + random() % std::min<uint64_t>(bytes_there, 200000);
    const uint64_t bytes = align_up(needed, align);
    memory[tag] = aligned_bytes(bytes);
    requests.push_back({.file = file_.get(),
                        .offset = offset,
                        .bytes = bytes,
                        .bytes_needed = needed,
                        .destination = memory[tag].get(),
                        .tag = tag,
                        .priority = tag % 3 == 0 ? ReadPriority::kPrefetch : ReadPriority::kDemand});
    bytes_total += std::min(bytes, bytes_there);
  }
  for (const ReadRequest& request : requests) device->submit(request);
  EXPECT_EQ(device->pending(), kReads);
  const auto completions = drain(*device);
  ASSERT_EQ(completions.size(), kReads);
  std::set<uint64_t> tags;
  for (const ReadCompletion& completion : completions) {
    ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
    EXPECT_GE(completion.latency_ns, 0);
    tags.insert(completion.tag);
    const ReadRequest& request = requests[completion.tag];
    EXPECT_EQ(first_wrong_offset(request.destination, request.offset, request.bytes_needed),
              request.offset + request.bytes_needed);
  }
  EXPECT_EQ(tags.size(), kReads);
  const DeviceStats stats = device->stats();
  EXPECT_EQ(stats.reads, kReads);
  EXPECT_EQ(stats.bytes, bytes_total);
  EXPECT_EQ(stats.errors, 0u);
  EXPECT_EQ(stats.cancelled, 0u);
  EXPECT_GT(stats.busy_ns, 0);
  EXPECT_EQ(device->stats().busy_ns, stats.busy_ns) << "an idle device is not busy";
}

TEST_P(DeviceTest, EarlyEndIsAShortRead) {
  const auto device = make_device(4);
  const uint64_t offset = align_down(kFileBytes - 2000, 4096);
  const AlignedBytes memory = aligned_bytes(16384);
  const auto completion = read_alone(*device, {.file = file_.get(),
                                               .offset = offset,
                                               .bytes = 16384,
                                               .bytes_needed = 16384,
                                               .destination = memory.get(),
                                               .tag = 5});
  ASSERT_FALSE(completion.status.ok());
  EXPECT_EQ(completion.tag, 5u);
  EXPECT_EQ(completion.status.error().code, ErrorCode::kShortRead);
  EXPECT_NE(completion.status.error().text.find(
                fmt::format("wanted 16384 bytes at offset {}, got {}", offset, kFileBytes - offset)),
            std::string::npos)
      << completion.status.error().text;
  EXPECT_EQ(device->stats().errors, 1u);
}

TEST_P(DeviceTest, TruncatedUnderneathIsAShortRead) {
  const auto device = make_device(4);
  ASSERT_EQ(::truncate(folder_.path_of("f").c_str(), kMiB), 0);
  const AlignedBytes memory = aligned_bytes(8192);
  const auto completion = read_alone(
      *device,
      {.file = file_.get(), .offset = 2 * kMiB, .bytes = 8192, .bytes_needed = 8192, .destination = memory.get()});
  ASSERT_FALSE(completion.status.ok());
  EXPECT_EQ(completion.status.error().code, ErrorCode::kShortRead);
  EXPECT_FALSE(file_->check_unchanged().ok());
}

TEST_P(DeviceTest, OffsetsBeyondFourGiB) {
  const std::string path = folder_.path_of("sparse");
  const uint64_t offset = 5 * kGiB + 4096;
  write_pattern(path, offset, 65536);
  const auto file = open_file(path, GetParam().mode);
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(65536);
  const auto completion = read_alone(
      *device,
      {.file = file.get(), .offset = offset, .bytes = 65536, .bytes_needed = 65536, .destination = memory.get()});
  ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
  EXPECT_EQ(first_wrong_offset(memory.get(), offset, 65536), offset + 65536);
}

TEST_P(DeviceTest, DeletedAndReplacedFileGoesOnBeingRead) {
  write_pattern(folder_.path_of("new"), 0, kFileBytes, 9);
  std::filesystem::rename(folder_.path_of("new"), folder_.path_of("f"));
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(kMiB);
  const auto completion = read_alone(
      *device, {.file = file_.get(), .offset = kMiB, .bytes = kMiB, .bytes_needed = kMiB, .destination = memory.get()});
  ASSERT_TRUE(completion.status.ok());
  EXPECT_EQ(first_wrong_offset(memory.get(), kMiB, kMiB), 2 * kMiB);
}

constexpr uint64_t kPrefetchBytes = 256 * kKiB;

// Submits `count` prefetch reads, tags 1 to count. Reads whose tags differ by a multiple of `places` share their
// destination in `memory`, so there must be more places than reads in flight.
void submit_prefetches(Device& device, const File& file, std::byte* memory, uint64_t count, uint64_t places) {
  for (uint64_t tag = 1; tag <= count; ++tag) {
    device.submit({.file = &file,
                   .offset = (tag % 8) * kPrefetchBytes,
                   .bytes = kPrefetchBytes,
                   .bytes_needed = kPrefetchBytes,
                   .destination = memory + (tag % places) * kPrefetchBytes,
                   .tag = tag,
                   .priority = ReadPriority::kPrefetch});
  }
}

size_t place_of(const std::vector<ReadCompletion>& completions, uint64_t tag) {
  const auto found =
      std::find_if(completions.begin(), completions.end(), [tag](const ReadCompletion& c) { return c.tag == tag; });
  return static_cast<size_t>(found - completions.begin());
}

TEST_P(DeviceTest, DemandOvertakesQueuedPrefetch) {
  const auto device = make_device(1);
  const AlignedBytes memory = aligned_bytes(8 * kPrefetchBytes);
  const AlignedBytes demand_memory = aligned_bytes(4096);
  submit_prefetches(*device, *file_, memory.get(), 1000, 8);
  std::vector<ReadCompletion> completions;
  device->poll(completions);
  device->submit({.file = file_.get(),
                  .offset = 0,
                  .bytes = 4096,
                  .bytes_needed = 4096,
                  .destination = demand_memory.get(),
                  .tag = 7777});
  // What had completed by now, and the one in flight, may come before it; nothing else.
  const uint64_t completed = device->stats().reads;
  ASSERT_LT(completed, 900u) << "the device was too fast for this test";
  for (const ReadCompletion& completion : drain(*device)) completions.push_back(completion);
  ASSERT_EQ(completions.size(), 1001u);
  EXPECT_LE(place_of(completions, 7777), completed + 1);
  EXPECT_EQ(first_wrong_offset(demand_memory.get(), 0, 4096), 4096u);
}

TEST_P(DeviceTest, RaisedPrefetchOvertakesTheOthers) {
  const auto device = make_device(1);
  const AlignedBytes memory = aligned_bytes(8 * kPrefetchBytes);
  submit_prefetches(*device, *file_, memory.get(), 500, 8);
  device->raise(500);
  const uint64_t completed = device->stats().reads;
  ASSERT_LT(completed, 400u) << "the device was too fast for this test";
  const auto completions = drain(*device);
  ASSERT_EQ(completions.size(), 500u);
  EXPECT_LE(place_of(completions, 500), completed + 1);
  device->raise(1);  // long gone
  EXPECT_EQ(device->pending(), 0u);
}

TEST_P(DeviceTest, CancelDropsQueuedReads) {
  const auto device = make_device(1);
  const AlignedBytes memory = aligned_bytes(8 * kPrefetchBytes);
  submit_prefetches(*device, *file_, memory.get(), 200, 8);
  EXPECT_FALSE(device->cancel(9999)) << "never submitted";
  std::set<uint64_t> cancelled;
  for (uint64_t tag = 200; tag > 100; --tag) {
    if (device->cancel(tag)) cancelled.insert(tag);
  }
  EXPECT_GT(cancelled.size(), 50u);
  EXPECT_FALSE(device->cancel(*cancelled.begin())) << "is cancelled already";
  const auto completions = drain(*device);
  EXPECT_EQ(completions.size(), 200 - cancelled.size());
  for (const ReadCompletion& completion : completions) EXPECT_FALSE(cancelled.contains(completion.tag));
  EXPECT_FALSE(device->cancel(1)) << "has completed";
  EXPECT_EQ(device->stats().cancelled, cancelled.size());
  EXPECT_EQ(device->stats().reads, 200 - cancelled.size());
  // The tag is free again.
  const auto again = read_alone(*device, {.file = file_.get(),
                                          .offset = 0,
                                          .bytes = 4096,
                                          .bytes_needed = 4096,
                                          .destination = memory.get(),
                                          .tag = *cancelled.begin()});
  EXPECT_TRUE(again.status.ok());
}

// Reads into, beyond and across the end of registered memory are the same reads.
TEST_P(DeviceTest, RegisteredMemoryChangesNoByte) {
  constexpr uint64_t kPiece = 64 * kKiB;
  constexpr uint64_t kRegistered = 20 * kPiece - 16 * kKiB;
  const AlignedBytes memory = aligned_bytes(40 * kPiece);
  const auto device = make_device(8);
  device->register_memory({memory.get(), kRegistered});
  for (uint64_t tag = 0; tag < 40; ++tag) {
    device->submit({.file = file_.get(),
                    .offset = tag * kPiece,
                    .bytes = kPiece,
                    .bytes_needed = kPiece,
                    .destination = memory.get() + tag * kPiece,
                    .tag = tag});
  }
  for (const ReadCompletion& completion : drain(*device)) {
    ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
  }
  EXPECT_EQ(first_wrong_offset(memory.get(), 0, 40 * kPiece), 40 * kPiece);
}

// A ring's table of files is bounded, models are not; and a file's address may come again with another file.
TEST_P(DeviceTest, ManyFilesAndFilesThatComeAndGo) {
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(8192);
  for (uint64_t salt = 1; salt <= 300; ++salt) {
    const std::string path = folder_.path_of("g" + std::to_string(salt % 7));
    std::filesystem::remove(path);
    write_pattern(path, 0, 8192, salt);
    const auto file = open_file(path, GetParam().mode);
    const auto completion = read_alone(*device, {.file = file.get(),
                                                 .offset = 0,
                                                 .bytes = 8192,
                                                 .bytes_needed = 8192,
                                                 .destination = memory.get(),
                                                 .tag = salt});
    ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
    ASSERT_EQ(first_wrong_offset(memory.get(), 0, 8192, salt), 8192u) << salt;
  }
}

TEST_P(DeviceTest, EmptyDeviceDoesNotBlock) {
  const auto device = make_device(4);
  std::vector<ReadCompletion> completions;
  device->wait(completions);
  device->poll(completions);
  EXPECT_TRUE(completions.empty());
  EXPECT_EQ(device->pending(), 0u);
  EXPECT_EQ(device->stats().busy_ns, 0);
}

TEST_P(DeviceTest, PollAloneBringsEverything) {
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(64 * kPrefetchBytes);
  submit_prefetches(*device, *file_, memory.get(), 50, 64);
  std::vector<ReadCompletion> completions;
  while (device->pending() > 0) device->poll(completions);
  EXPECT_EQ(completions.size(), 50u);
}

TEST_P(DeviceTest, DestructionWithReadsPending) {
  AlignedBytes memory = aligned_bytes(128 * kPrefetchBytes);
  {
    const auto device = make_device(4);
    submit_prefetches(*device, *file_, memory.get(), 100, 128);
    std::vector<ReadCompletion> completions;
    device->poll(completions);
  }
  // Nothing may write here any more; the sanitizers and the allocator watch.
  memory.reset();
}

TEST_P(DeviceTest, ThreadThatSubmittedMayEnd) {
  const auto device = make_device(8);
  const AlignedBytes memory = aligned_bytes(64 * kPrefetchBytes);
  std::vector<ReadCompletion> completions;
  std::thread([&] {
    submit_prefetches(*device, *file_, memory.get(), 40, 64);
    device->poll(completions);
  }).join();
  for (const ReadCompletion& completion : drain(*device)) completions.push_back(completion);
  ASSERT_EQ(completions.size(), 40u);
  for (const ReadCompletion& completion : completions) {
    ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
    const uint64_t offset = (completion.tag % 8) * kPrefetchBytes;
    EXPECT_EQ(first_wrong_offset(memory.get() + completion.tag * kPrefetchBytes, offset, kPrefetchBytes),
              offset + kPrefetchBytes);
  }
}

TEST_P(DeviceTest, SignalsDoNotDisturb) {
  struct sigaction action = {};
  struct sigaction action_before = {};
  action.sa_handler = [](int) {};  // without SA_RESTART: system calls return EINTR
  ASSERT_EQ(::sigaction(SIGALRM, &action, &action_before), 0);
  const itimerval often = {{0, 300}, {0, 300}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  const auto device = make_device(2);
  const AlignedBytes memory = aligned_bytes(64 * kPrefetchBytes);
  submit_prefetches(*device, *file_, memory.get(), 60, 64);
  const auto completions = drain(*device);
  const itimerval never = {};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &action_before, nullptr);
  ASSERT_EQ(completions.size(), 60u);
  for (const ReadCompletion& completion : completions) EXPECT_TRUE(completion.status.ok());
  EXPECT_EQ(first_wrong_offset(memory.get() + 60 * kPrefetchBytes, 4 * kPrefetchBytes, kPrefetchBytes),
            5 * kPrefetchBytes);
}

// What only the devices that read from the file's own descriptor can meet.
class RealDeviceTest : public DeviceTest {};

TEST_P(RealDeviceTest, BadDescriptorIsAnErrorCompletion) {
  swap_descriptor("/dev/null", O_WRONLY);
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(8192);
  const auto completion = read_alone(
      *device, {.file = file_.get(), .offset = 4096, .bytes = 8192, .bytes_needed = 8000, .destination = memory.get()});
  ASSERT_FALSE(completion.status.ok());
  const Error& error = completion.status.error();
  EXPECT_EQ(error.code, ErrorCode::kDeviceError);
  EXPECT_EQ(error.system_error, EBADF);
  EXPECT_NE(error.text.find("8000 bytes at offset 4096"), std::string::npos) << error.text;
  EXPECT_NE(error.text.find(file_->path()), std::string::npos) << error.text;
  EXPECT_EQ(device->stats().errors, 1u);
}

// /proc/self/mem is a drive with bad sectors: what is not mapped answers EIO.
TEST_P(RealDeviceTest, BadSectorIsRetriedAndThenAnError) {
  swap_descriptor("/proc/self/mem", O_RDONLY);
  const auto device = make_device(4);
  const AlignedBytes memory = aligned_bytes(8192);
  const auto completion = read_alone(
      *device, {.file = file_.get(), .offset = 4096, .bytes = 8192, .bytes_needed = 8192, .destination = memory.get()});
  ASSERT_FALSE(completion.status.ok());
  EXPECT_EQ(completion.status.error().code, ErrorCode::kDeviceError);
  EXPECT_EQ(completion.status.error().system_error, EIO);
  EXPECT_EQ(device->stats().retries, static_cast<uint64_t>(Device::kRetriesMax));
  EXPECT_EQ(device->stats().errors, 1u);
  EXPECT_EQ(device->stats().reads, 1u);
}

// seq files of proc hand out a buffer's worth per read: short reads, many in a row.
TEST_P(RealDeviceTest, ShortReadsAreContinued) {
  const auto symbols = File::open("/proc/kallsyms", DirectMode::kOff);
  if (!symbols.ok()) GTEST_SKIP() << symbols.error().message();
  constexpr uint64_t kBytes = 200 * kKiB;
  std::vector<std::byte> expected(kBytes);
  if (!symbols.value()->read_exactly(0, expected.data(), kBytes).ok()) GTEST_SKIP() << "/proc/kallsyms is small";
  std::vector<std::byte> once(kBytes);
  ASSERT_LT(::pread(symbols.value()->fd(), once.data(), kBytes, 0), static_cast<ssize_t>(kBytes));

  const auto device = make_device(4);
  std::vector<std::byte> data(kBytes);
  const auto completion = read_alone(*device, {.file = symbols.value().get(),
                                               .offset = 0,
                                               .bytes = kBytes,
                                               .bytes_needed = kBytes,
                                               .destination = data.data()});
  ASSERT_TRUE(completion.status.ok()) << completion.status.error().message();
  EXPECT_EQ(data, expected);
  EXPECT_EQ(device->stats().reads, 1u);
  EXPECT_EQ(device->stats().bytes, kBytes);
}

constexpr Setup kRealSetups[] = {{Kind::kUring, DirectMode::kRequire},
                                 {Kind::kUring, DirectMode::kOff},
                                 {Kind::kPread, DirectMode::kRequire},
                                 {Kind::kPread, DirectMode::kOff}};

INSTANTIATE_TEST_SUITE_P(Real, DeviceTest, testing::ValuesIn(kRealSetups), setup_name);
INSTANTIATE_TEST_SUITE_P(Real, RealDeviceTest, testing::ValuesIn(kRealSetups), setup_name);
INSTANTIATE_TEST_SUITE_P(Memory, DeviceTest, testing::Values(Setup{Kind::kMemory, DirectMode::kOff}), setup_name);

}  // namespace
}  // namespace sluice
