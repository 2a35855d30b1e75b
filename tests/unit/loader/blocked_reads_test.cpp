// Waiting for a slow drive must cost no processor time. pread itself is slow here: this program's own stands before
// libc's. (io_uring cannot be slowed this way; its wait is one system call.)
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "loader_fixture.h"

namespace {

std::atomic<int> read_delay_ms{0};
std::atomic<int> reads_delayed{0};

}  // namespace

extern "C" ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  if (const int delay_ms = read_delay_ms; delay_ms > 0) {
    ++reads_delayed;
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  }
  return syscall(SYS_pread64, fd, data, bytes, offset);
}

namespace sluice {
namespace {

constexpr int kDelayMs = 300;

int64_t cpu_ns(int who) {
  rusage usage = {};
  EXPECT_EQ(getrusage(who, &usage), 0);
  const auto ns = [](const timeval& time) { return (time.tv_sec * int64_t{1'000'000} + time.tv_usec) * 1000; };
  return ns(usage.ru_utime) + ns(usage.ru_stime);
}

TEST(BlockedReads, CostNoProcessorTime) {
  const auto model = make_test_model({4096}, 8, DirectMode::kOff);
  auto device = open_device({.path = IoPath::kPread, .threads = 4});
  ASSERT_TRUE(device.ok());
  auto loader = Loader::create(model->sources, std::move(*device), {.budget_bytes = kMiB, .top_k = 2});
  ASSERT_TRUE(loader.ok()) << loader.error().message();
  read_delay_ms = kDelayMs;
  const int64_t begin_ns = now_ns();
  const int64_t thread_begin_ns = cpu_ns(RUSAGE_THREAD);
  const int64_t process_begin_ns = cpu_ns(RUSAGE_SELF);
  ASSERT_TRUE((*loader)->start(model->sources[0].layer, std::vector<uint32_t>{0, 5}).ok());
  size_t n_ready = 0;
  for (;;) {
    const auto ready = (*loader)->next();
    ASSERT_TRUE(ready.ok()) << ready.error().message();
    if (ready->empty()) break;
    n_ready += ready->size();
  }
  (*loader)->end();
  const int64_t thread_ns = cpu_ns(RUSAGE_THREAD) - thread_begin_ns;
  const int64_t process_ns = cpu_ns(RUSAGE_SELF) - process_begin_ns;
  read_delay_ms = 0;
  EXPECT_EQ(n_ready, 2u);
  EXPECT_GE(reads_delayed, 6) << "three matrices of two experts were to be read by the slow pread";
  constexpr int64_t kMs = 1'000'000;
  EXPECT_GE(now_ns() - begin_ns, kDelayMs * kMs);
  EXPECT_GE((*loader)->stall_ns(), kDelayMs * kMs * 9 / 10);
  EXPECT_LT(thread_ns, 50 * kMs);
  EXPECT_LT(process_ns, 50 * kMs);
}

}  // namespace
}  // namespace sluice
