#include "pool/slot_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <string>

#include "base/bytes.h"

namespace sluice {
namespace {

// A line of /proc/self/status, in KiB.
uint64_t status_kib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1));
  }
  return 0;
}

TEST(SlotMemory, StartsOnAPageAndIsWritable) {
  auto memory = std::move(SlotMemory::create(3 * 4096 + 5)).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % SlotMemory::page_bytes(), 0u);
  EXPECT_EQ(memory.bytes(), 3u * 4096 + 5);
  std::memset(memory.data(), 1, memory.bytes());
  EXPECT_TRUE(memory.missing().empty());
}

TEST(SlotMemory, LargeMemoryStartsOnAHugePage) {
  auto memory = std::move(SlotMemory::create(9 * kMiB)).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % (2 * kMiB), 0u);
  EXPECT_EQ(memory.huge(), memory.missing().empty());
}

TEST(SlotMemory, TouchedMemoryIsPresentFromTheStart) {
  const uint64_t before_kib = status_kib("VmRSS");
  auto memory = std::move(SlotMemory::create(32 * kMiB, {.touch = true})).value();
  EXPECT_GE(status_kib("VmRSS"), before_kib + 31 * 1024);
  memory.give_back(0, 32 * kMiB);
  EXPECT_LE(status_kib("VmRSS"), before_kib + 8 * 1024);
}

TEST(SlotMemory, LockedMemoryCanBeLentAndTakenAgain) {
  const uint64_t before_kib = status_kib("VmLck");
  auto memory = std::move(SlotMemory::create(64 * kKiB, {.lock = Wish::kTry})).value();
  if (!memory.locked()) GTEST_SKIP() << memory.missing().front();
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "mlock does nothing under a sanitizer";
#endif
  EXPECT_GE(status_kib("VmLck"), before_kib + 64);
  std::memset(memory.data(), 1, memory.bytes());
  memory.give_back(16 * kKiB, 16 * kKiB);
  EXPECT_EQ(memory.data()[16 * kKiB - 1], std::byte{1});
  EXPECT_EQ(memory.data()[32 * kKiB], std::byte{1});
  memory.take_again(16 * kKiB, 16 * kKiB);
  EXPECT_EQ(memory.data()[16 * kKiB], std::byte{0});
  EXPECT_GE(status_kib("VmLck"), before_kib + 64);
}

TEST(SlotMemory, AWishThatCannotBeHadIsALineAndADemandIsAnError) {
  // As root the limit does not count: then there is nothing to see.
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &none), 0);
  const auto tried = SlotMemory::create(64 * kKiB, {.lock = Wish::kTry});
  const auto demanded = SlotMemory::create(64 * kKiB, {.lock = Wish::kDemand});
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  ASSERT_TRUE(tried.ok());
  if (tried->locked()) GTEST_SKIP() << "this user may lock any memory";
  ASSERT_EQ(tried->missing().size(), 1u);
  EXPECT_NE(tried->missing()[0].find("64.0 KiB of slot memory may be reclaimed: "), std::string::npos);
  ASSERT_FALSE(demanded.ok());
  EXPECT_EQ(demanded.error().code, ErrorCode::kUnsupported);
}

TEST(SlotMemory, MemoryThatIsNotToBeHadIsAnErrorWithTheBytes) {
  const auto memory = SlotMemory::create(uint64_t{1} << 60);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.error().code, ErrorCode::kNoMemory);
  EXPECT_NE(memory.error().message().find("wanted 1048576 TiB"), std::string::npos) << memory.error().message();
}

}  // namespace
}  // namespace sluice
