#include "io/paced_device.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr uint64_t kReadBytes = 16384;

class PacedDeviceTest : public testing::Test {
 protected:
  PacedDeviceTest() {
    write_pattern(folder_.path_of("data"), 0, 64 * kReadBytes);
    file_ = open_file(folder_.path_of("data"), DirectMode::kOff);
    memory_ = aligned_bytes(64 * kReadBytes);
  }
  ReadRequest request(uint64_t index, ReadPriority priority = ReadPriority::kDemand) {
    return {.file = file_.get(),
            .offset = index * kReadBytes,
            .bytes = kReadBytes,
            .bytes_needed = kReadBytes,
            .destination = memory_.get() + index * kReadBytes,
            .tag = index,
            .priority = priority};
  }

  TempFolder folder_;
  std::shared_ptr<const File> file_;
  AlignedBytes memory_;
};

TEST_F(PacedDeviceTest, ReadsTakeAsLongAsTheDriveWould) {
  // 16 reads of 16 KiB at 10 MB/s: 26 ms and one latency of 2 ms. More by a busy machine, less never.
  PacedDevice device({.bytes_per_s = 10e6, .latency_ns = 2'000'000});
  const int64_t begin_ns = now_ns();
  for (uint64_t i = 0; i < 16; ++i) device.submit(request(i));
  EXPECT_EQ(device.pending(), 16u);
  const auto completions = drain(device);
  const double seconds = seconds_of(now_ns() - begin_ns);
  ASSERT_EQ(completions.size(), 16u);
  for (const ReadCompletion& completion : completions) EXPECT_TRUE(completion.status.ok());
  EXPECT_EQ(first_wrong_offset(memory_.get(), 0, 16 * kReadBytes), 16 * kReadBytes);
  EXPECT_GE(seconds, 16 * kReadBytes / 10e6 + 0.002);
}

TEST_F(PacedDeviceTest, TheDriveGoesOnBetweenTwoCalls) {
  PacedDevice device({.bytes_per_s = 10e6, .latency_ns = 0, .depth = 1});
  for (uint64_t i = 0; i < 4; ++i) device.submit(request(i));
  const int64_t begin_ns = now_ns();
  while (now_ns() - begin_ns < 10'000'000) {
  }
  std::vector<ReadCompletion> completions;
  device.poll(completions);  // 4 reads of 1.6 ms, one at a time, are over
  EXPECT_EQ(completions.size(), 4u);
}

TEST_F(PacedDeviceTest, DemandGoesBeforeQueuedPrefetches) {
  PacedDevice device({.bytes_per_s = 100e6, .latency_ns = 0, .depth = 2});
  for (uint64_t i = 0; i < 8; ++i) device.submit(request(i, ReadPriority::kPrefetch));
  device.submit(request(8));
  EXPECT_TRUE(device.cancel(7));
  EXPECT_FALSE(device.cancel(0));  // in flight
  const auto completions = drain(device);
  ASSERT_EQ(completions.size(), 8u);
  EXPECT_EQ(completions[2].tag, 8u);  // behind the two that were in flight
}

TEST(PacedDrive, IsReadFromText) {
  const auto drive = parse_paced_drive("5e8,100");
  ASSERT_TRUE(drive.ok());
  EXPECT_EQ(drive->bytes_per_s, 5e8);
  EXPECT_EQ(drive->latency_ns, 100'000);
  for (const char* text : {"", "5", "0,1", "x,1", "1e9,", "1e9,-1", "1e9,1,1", "nan,1"}) {
    EXPECT_FALSE(parse_paced_drive(text).ok()) << text;
  }
}

}  // namespace
}  // namespace sluice
