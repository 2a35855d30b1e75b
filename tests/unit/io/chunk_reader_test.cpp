// Ranges come in the order in which they were asked for, with their bytes, whatever the device does; a failed read is
// told and nothing is read into memory that is gone.
#include "io/chunk_reader.h"

#include <random>

#include "io/fault_device.h"
#include "io/memory_device.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr uint64_t kFileBytes = 300 * kKiB + 123;

class ChunkReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    for (uint64_t salt : {0, 1}) write_pattern(folder_.path_of(std::to_string(salt)), 0, kFileBytes, salt);
  }
  // Two files, so that their ranges take turns.
  void open(DirectMode mode) {
    for (uint64_t salt : {0, 1}) files_.push_back(open_file(folder_.path_of(std::to_string(salt)), mode));
  }
  std::vector<ChunkRequest> random_requests(unsigned seed, size_t n) const {
    std::mt19937_64 random(seed);
    std::vector<ChunkRequest> requests;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t offset = random() % kFileBytes;
      const uint64_t bytes = 1 + random() % std::min<uint64_t>(kFileBytes - offset, 40 * kKiB);
      requests.push_back({files_[random() % 2].get(), offset, bytes});
    }
    requests.push_back({files_[0].get(), kFileBytes - 1, 1});
    requests.push_back({files_[1].get(), 0, kFileBytes});
    return requests;
  }
  void expect_all(Device& device, const std::vector<ChunkRequest>& requests, uint32_t depth) const {
    auto reader = ChunkReader::create(device, requests, depth);
    ASSERT_TRUE(reader.ok());
    EXPECT_EQ(device.stats().reads, 0u) << "nothing is read before somebody asks";
    for (const ChunkRequest& request : requests) {
      const auto chunk = (*reader)->next();
      ASSERT_TRUE(chunk.ok()) << chunk.error().message();
      ASSERT_EQ(chunk->size(), request.bytes);
      ASSERT_EQ(first_wrong_offset(chunk->data(), request.offset, request.bytes, request.file == files_[1].get()),
                request.offset + request.bytes);
    }
    EXPECT_EQ(device.pending(), 0u);
    EXPECT_EQ(device.stats().reads, requests.size());
  }

  TempFolder folder_;
  std::vector<std::shared_ptr<const File>> files_;
};

TEST_F(ChunkReaderTest, RangesComeInOrderWithTheirBytes) {
  open(DirectMode::kOff);
  for (const uint32_t depth : {0u, 1u, 3u, 64u}) {
    MemoryDevice device(1);  // one read for each look: most are still queued
    expect_all(device, random_requests(depth, 40), depth);
  }
}

TEST_F(ChunkReaderTest, DirectReadsTakeAnyOffsets) {
  open(DirectMode::kAuto);
  const auto device = std::move(open_device({})).value();
  expect_all(*device, random_requests(7, 40), ChunkReader::kDepthDefault);
}

TEST_F(ChunkReaderTest, TheDevicesOrderDoesNotMatter) {
  open(DirectMode::kOff);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    FaultDevice device(std::make_unique<MemoryDevice>(), {.seed = seed, .delay = 0.5, .reorder = 1.0});
    expect_all(device, random_requests(static_cast<unsigned>(seed), 20), 5);
    EXPECT_GT(device.fault_counts().delayed, 0u);
  }
}

TEST_F(ChunkReaderTest, AFailedReadIsToldAtItsPlace) {
  open(DirectMode::kOff);
  int failures = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    FaultDevice device(std::make_unique<MemoryDevice>(),
                       {.seed = seed, .delay = 0.3, .reorder = 0.5, .cut_short = 0.02, .fail = 0.03});
    const std::vector<ChunkRequest> requests = random_requests(static_cast<unsigned>(seed), 20);
    auto reader = ChunkReader::create(device, requests, 4);
    ASSERT_TRUE(reader.ok());
    for (const ChunkRequest& request : requests) {
      const auto chunk = (*reader)->next();
      if (!chunk) {
        ++failures;
        EXPECT_TRUE(chunk.error().code == ErrorCode::kDeviceError || chunk.error().code == ErrorCode::kShortRead);
        EXPECT_NE(chunk.error().message().find(request.file->path()), std::string::npos) << chunk.error().message();
        break;
      }
      ASSERT_EQ(first_wrong_offset(chunk->data(), request.offset, request.bytes, request.file == files_[1].get()),
                request.offset + request.bytes);
    }
    reader->reset();
    EXPECT_EQ(device.pending(), 0u);
  }
  EXPECT_GT(failures, 50);
  EXPECT_LT(failures, 200);
}

TEST_F(ChunkReaderTest, ARangeBehindTheEndIsAnError) {
  open(DirectMode::kOff);
  MemoryDevice device;
  auto reader = ChunkReader::create(device, {{files_[0].get(), 0, 10}, {files_[0].get(), kFileBytes - 5, 6}});
  ASSERT_TRUE(reader.ok());
  EXPECT_TRUE((*reader)->next().ok());
  const auto chunk = (*reader)->next();
  ASSERT_FALSE(chunk.ok());
  EXPECT_EQ(chunk.error().code, ErrorCode::kShortRead);
}

// Under the address sanitizer a read into a buffer that is gone would show.
TEST_F(ChunkReaderTest, GivenUpEarlyItWaitsForItsReads) {
  open(DirectMode::kAuto);
  const auto real = std::move(open_device({})).value();
  MemoryDevice slow(1);  // has read one range when the first is asked for
  for (Device* device : {real.get(), static_cast<Device*>(&slow)}) {
    for (const size_t taken : {size_t{0}, size_t{1}, size_t{5}}) {
      auto reader = ChunkReader::create(*device, random_requests(3, 20));
      ASSERT_TRUE(reader.ok());
      for (size_t i = 0; i < taken; ++i) ASSERT_TRUE((*reader)->next().ok());
      if (device == &slow) {
        EXPECT_EQ(device->pending() > 0, taken > 0);
      }
      reader->reset();
      EXPECT_EQ(device->pending(), 0u);
    }
  }
}

TEST_F(ChunkReaderTest, NothingToReadIsNoError) {
  MemoryDevice device;
  EXPECT_TRUE(ChunkReader::create(device, {}).ok());
}

}  // namespace
}  // namespace sluice
