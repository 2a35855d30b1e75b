// Which device is opened, and what happens where the kernel or a sandbox refuses io_uring, at once or later. The
// refusals are real: a child process takes the system calls from itself with seccomp.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

// From here on the calling process gets this errno from this system call.
bool refuse_system_call(unsigned number, unsigned error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error & SECCOMP_RET_DATA)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {.len = 4, .filter = program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Ends a child with 0 when all is well.
void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ::_exit(1);
}

TEST(OpenDevice, PathTexts) {
  EXPECT_EQ(parse_io_path("auto").value(), IoPath::kAuto);
  EXPECT_EQ(parse_io_path("io_uring").value(), IoPath::kUring);
  EXPECT_EQ(parse_io_path("pread").value(), IoPath::kPread);
  EXPECT_EQ(parse_io_path("synthetic").value(), IoPath::kSynthetic);
  EXPECT_EQ(parse_io_path("mmap").error().code, ErrorCode::kBadArgument);
  EXPECT_NE(parse_io_path("mmap").error().text.find("mmap"), std::string::npos);
}

TEST(OpenDevice, DepthIsBounded) {
  EXPECT_EQ(open_device({.depth = 0}).error().code, ErrorCode::kBadArgument);
  EXPECT_EQ(open_device({.depth = DeviceOptions::kDepthMax + 1}).error().code, ErrorCode::kBadArgument);
  EXPECT_TRUE(open_device({.path = IoPath::kPread, .depth = DeviceOptions::kDepthMax, .threads = 2}).ok());
}

TEST(OpenDevice, ByName) {
  EXPECT_EQ(open_device({.path = IoPath::kPread}).value()->name(), "pread");
  const auto uring = open_device({.path = IoPath::kUring});
  const auto automatic = open_device({.path = IoPath::kAuto});
  ASSERT_TRUE(automatic.ok());
  if (!uring.ok()) {
    EXPECT_EQ(uring.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(automatic.value()->name(), "pread");
  } else {
    EXPECT_EQ(uring.value()->name(), "io_uring");
    EXPECT_EQ(automatic.value()->name(), "io_uring");
  }
}

// In a child whose `system_call` answers `error`: by name it is refused, else the pool does the reading.
void expect_fallback(unsigned system_call, unsigned error) {
  TempFolder folder;
  write_pattern(folder.path_of("f"), 0, 8192);
  require(refuse_system_call(system_call, error), "seccomp works");
  const auto by_name = open_device({.path = IoPath::kUring});
  require(!by_name.ok() && by_name.error().code == ErrorCode::kUnsupported, "io_uring by name is refused");
  auto device = open_device({.path = IoPath::kAuto, .depth = 4});
  require(device.ok() && device.value()->name() == "pread", "the pool takes over");
  const auto file = open_file(folder.path_of("f"), DirectMode::kOff);
  std::vector<std::byte> data(8192);
  device.value()->submit(
      {.file = file.get(), .offset = 0, .bytes = 8192, .bytes_needed = 8192, .destination = data.data()});
  const auto completions = drain(*device.value());
  require(completions.size() == 1 && completions[0].status.ok(), "the read succeeds");
  require(first_wrong_offset(data.data(), 0, 8192) == 8192, "the bytes are right");
}

#ifdef SYS_io_uring_setup
TEST(OpenDevice, SetupRefused) {
  EXPECT_EXIT((expect_fallback(SYS_io_uring_setup, EPERM), ::_exit(0)), testing::ExitedWithCode(0),
              "pool of threads: .*Operation not permitted.*sandbox");
  EXPECT_EXIT((expect_fallback(SYS_io_uring_setup, ENOSYS), ::_exit(0)), testing::ExitedWithCode(0),
              "pool of threads: .*Linux 5.6");
  EXPECT_EXIT((expect_fallback(SYS_io_uring_setup, ENOMEM), ::_exit(0)), testing::ExitedWithCode(0),
              "pool of threads: .*locked memory");
}

TEST(OpenDevice, SetupAllowedButEnterRefused) {
  EXPECT_EXIT((expect_fallback(SYS_io_uring_enter, EPERM), ::_exit(0)), testing::ExitedWithCode(0),
              "pool of threads: .*Operation not permitted");
}

// Registering files and memory only saves time: reads are right where the kernel refuses both.
TEST(OpenDevice, RegisteringRefused) {
  if (!open_device({.path = IoPath::kUring}).ok()) GTEST_SKIP() << "no io_uring here";
  const auto read_unregistered = [] {
    TempFolder folder;
    write_pattern(folder.path_of("f"), 0, 8192);
    require(refuse_system_call(SYS_io_uring_register, ENOMEM), "seccomp works");
    auto device = open_device({.path = IoPath::kUring, .depth = 4});
    require(device.ok() && device.value()->name() == "io_uring", "the ring is used");
    const AlignedBytes memory = aligned_bytes(8192);
    device.value()->register_memory({memory.get(), 8192});
    const auto file = open_file(folder.path_of("f"), DirectMode::kAuto);
    device.value()->submit(
        {.file = file.get(), .offset = 0, .bytes = 8192, .bytes_needed = 8192, .destination = memory.get()});
    const auto completions = drain(*device.value());
    require(completions.size() == 1 && completions[0].status.ok(), "the read succeeds");
    require(first_wrong_offset(memory.get(), 0, 8192) == 8192, "the bytes are right");
    ::_exit(0);
  };
  EXPECT_EXIT(read_unregistered(), testing::ExitedWithCode(0), "8.00 KiB of locked memory, the limit");
}

// The ring dies under way, with reads queued and reads in the kernel's hands. After a pause these have come back, and
// the next ones stand prepared for a kernel that does not take them.
void expect_errors_not_a_hang(std::chrono::milliseconds pause) {
  TempFolder folder;
  write_pattern(folder.path_of("f"), 0, 4 * kMiB);
  const auto file = open_file(folder.path_of("f"), DirectMode::kAuto);
  auto device = std::move(open_device({.path = IoPath::kUring, .depth = 4})).value();
  const AlignedBytes memory = aligned_bytes(4 * kMiB);
  const auto submit = [&](uint64_t tag) {
    device->submit({.file = file.get(),
                    .offset = (tag % 16) * 256 * kKiB,
                    .bytes = 256 * kKiB,
                    .bytes_needed = 256 * kKiB,
                    .destination = memory.get() + (tag % 16) * 256 * kKiB,
                    .tag = tag});
  };
  for (uint64_t tag = 0; tag < 16; ++tag) submit(tag);
  std::vector<ReadCompletion> completions;
  device->poll(completions);
  require(refuse_system_call(SYS_io_uring_enter, EPERM), "seccomp works");
  std::this_thread::sleep_for(pause);
  const int64_t start_ns = now_ns();
  for (const ReadCompletion& completion : drain(*device)) completions.push_back(completion);
  require(completions.size() == 16, "every read has its completion");
  size_t failed = 0;
  for (const ReadCompletion& completion : completions) {
    const uint64_t offset = (completion.tag % 16) * 256 * kKiB;
    if (completion.status.ok()) {
      require(first_wrong_offset(memory.get() + offset, offset, 256 * kKiB) == offset + 256 * kKiB, "bytes are right");
    } else {
      require(completion.status.error().code == ErrorCode::kDeviceError, "the error is kDeviceError");
      ++failed;
    }
  }
  require(failed >= 16 - 2 * 4, "what the kernel did not have fails");
  require(seconds_of(now_ns() - start_ns) < 5, "it fails soon");
  submit(99);
  std::vector<ReadCompletion> later;
  device->poll(later);
  require(later.size() == 1 && !later[0].status.ok(), "a later read fails too");
  require(device->stats().errors == failed + 1, "the errors are counted");
  device.reset();
}

TEST(OpenDevice, RingThatDiesUnderWayFailsItsReads) {
  if (!open_device({.path = IoPath::kUring}).ok()) GTEST_SKIP() << "no io_uring here";
  for (const int pause_ms : {0, 200}) {
    EXPECT_EXIT((expect_errors_not_a_hang(std::chrono::milliseconds(pause_ms)), ::_exit(0)), testing::ExitedWithCode(0),
                "no longer takes io_uring calls");
  }
}
#endif

}  // namespace
}  // namespace sluice
