#include "io/synthetic_device.h"

#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr uint64_t kPage = 4096;

TEST(SyntheticDevice, CompletesEveryReadAtOnceAndTouchesEachPageOnly) {
  TempFolder folder;
  write_pattern(folder.path_of("file"), 0, 16 * kPage);
  const auto file = open_file(folder.path_of("file"), DirectMode::kOff);
  const auto opened = open_device({.path = IoPath::kSynthetic});
  ASSERT_TRUE(opened.ok());
  Device& device = **opened;
  EXPECT_EQ(device.name(), "synthetic");
  const AlignedBytes memory = aligned_bytes(16 * kPage);
  std::fill_n(memory.get(), 16 * kPage, std::byte{0x5a});
  for (uint64_t tag = 0; tag < 4; ++tag) {
    device.submit({.file = file.get(),
                   .offset = tag * 3 * kPage,
                   .bytes = 3 * kPage,
                   .bytes_needed = 3 * kPage - 10,
                   .destination = memory.get() + tag * 3 * kPage,
                   .tag = tag});
  }
  EXPECT_EQ(device.pending(), 4u);
  std::vector<ReadCompletion> completions;
  device.poll(completions);
  ASSERT_EQ(completions.size(), 4u);
  for (const ReadCompletion& completion : completions) EXPECT_TRUE(completion.status.ok());
  EXPECT_EQ(device.pending(), 0u);
  EXPECT_EQ(device.stats().reads, 4u);
  EXPECT_EQ(device.stats().bytes, 4 * (3 * kPage - 10));
  for (uint64_t at = 0; at < 16 * kPage; ++at) {
    const std::byte expected = at % kPage == 0 && at < 12 * kPage ? std::byte{0} : std::byte{0x5a};
    ASSERT_EQ(memory[at], expected) << "byte " << at << ": nothing is read, and nothing else is written";
  }
  device.wait(completions);  // returns at once
  EXPECT_EQ(completions.size(), 4u);
}

TEST(SyntheticDevice, DropsWhatIsCancelled) {
  TempFolder folder;
  write_pattern(folder.path_of("file"), 0, kPage);
  const auto file = open_file(folder.path_of("file"), DirectMode::kOff);
  SyntheticDevice device;
  const AlignedBytes memory = aligned_bytes(kPage);
  device.submit({.file = file.get(), .bytes = kPage, .bytes_needed = kPage, .destination = memory.get(), .tag = 7});
  EXPECT_TRUE(device.cancel(7));
  EXPECT_FALSE(device.cancel(7));
  EXPECT_TRUE(drain(device).empty());
}

}  // namespace
}  // namespace sluice
