#include "io/file.h"

#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "base/log.h"
#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

TEST(File, DirectModeTexts) {
  EXPECT_EQ(parse_direct_mode("auto").value(), DirectMode::kAuto);
  EXPECT_EQ(parse_direct_mode("on").value(), DirectMode::kRequire);
  EXPECT_EQ(parse_direct_mode("off").value(), DirectMode::kOff);
  EXPECT_EQ(parse_direct_mode("On").error().code, ErrorCode::kBadArgument);
}

TEST(File, OpensWithSizeAndAlignment) {
  TempFolder folder;
  write_pattern(folder.path_of("f"), 0, 10000);
  const auto buffered = open_file(folder.path_of("f"), DirectMode::kOff);
  EXPECT_FALSE(buffered->direct());
  EXPECT_EQ(buffered->align_bytes(), 1u);
  EXPECT_EQ(buffered->size_bytes(), 10000u);
  EXPECT_EQ(buffered->path(), folder.path_of("f"));
  const auto automatic = open_file(folder.path_of("f"), DirectMode::kAuto);
  EXPECT_EQ(automatic->size_bytes(), 10000u);
  EXPECT_EQ(automatic->inode(), buffered->inode());
  EXPECT_EQ(automatic->device(), buffered->device());
  EXPECT_TRUE(is_power_of_two(automatic->align_bytes()));
  if (!automatic->direct()) {
    EXPECT_EQ(automatic->align_bytes(), 1u);
    GTEST_SKIP() << "no direct I/O in " << folder.path();
  }
  // The alignment that is promised is enough for a read.
  const uint64_t align = automatic->align_bytes();
  const AlignedBytes memory = aligned_bytes(2 * align + 4096);
  ASSERT_EQ(::pread(automatic->fd(), memory.get(), align, static_cast<off_t>(align)), static_cast<ssize_t>(align))
      << "align " << align;
  EXPECT_EQ(first_wrong_offset(memory.get(), align, align), 2 * align);
}

TEST(File, SmallerThanABlockAndEmpty) {
  TempFolder folder;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{100}}) {
    const std::string path = folder.path_of(std::to_string(bytes));
    write_pattern(path, 0, bytes);
    for (const DirectMode mode : {DirectMode::kAuto, DirectMode::kOff}) {
      const auto file = open_file(path, mode);
      EXPECT_EQ(file->size_bytes(), bytes);
      std::vector<std::byte> data(bytes + 1);
      EXPECT_TRUE(file->read_exactly(0, data.data(), bytes).ok());
      EXPECT_EQ(first_wrong_offset(data.data(), 0, bytes), bytes);
    }
  }
}

TEST(File, RefusesWhatIsNoRegularFile) {
  TempFolder folder;
  EXPECT_EQ(File::open(folder.path_of("none"), DirectMode::kAuto).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(File::open(folder.path(), DirectMode::kAuto).error().code, ErrorCode::kBadFile);
  EXPECT_EQ(File::open("/dev/null", DirectMode::kAuto).error().code, ErrorCode::kBadFile);
  // A pipe nobody writes to must not hang the opening.
  ASSERT_EQ(::mkfifo(folder.path_of("pipe").c_str(), 0600), 0);
  EXPECT_EQ(File::open(folder.path_of("pipe"), DirectMode::kAuto).error().code, ErrorCode::kBadFile);
}

// proc's files are regular and know no direct I/O. In a child, for the once-only line must not have been said before.
TEST(File, FallsBackToBufferedWithOneLine) {
  EXPECT_EXIT(
      {
        std::vector<std::string> lines;
        set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
        const auto first = File::open("/proc/version", DirectMode::kAuto);
        const auto second = File::open("/proc/cpuinfo", DirectMode::kAuto);
        const bool buffered = first.ok() && second.ok() && !first.value()->direct() && !second.value()->direct();
        char text[5] = {};
        const bool reads = buffered && first.value()->read_exactly(0, text, 5).ok() && std::string(text, 5) == "Linux";
        for (const std::string& line : lines) std::fprintf(stderr, "%s\n", line.c_str());
        ::_exit(reads && lines.size() == 1 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "no direct I/O in '/proc' .*Invalid argument");
}

TEST(File, DirectDemandedAndNotToBeHad) {
  const auto file = File::open("/proc/version", DirectMode::kRequire);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(file.error().text.find("/proc/version"), std::string::npos);
}

TEST(File, ReadExactlyAtTheEnd) {
  TempFolder folder;
  write_pattern(folder.path_of("f"), 0, 5000);
  const auto file = open_file(folder.path_of("f"), DirectMode::kAuto);
  std::vector<std::byte> data(5000);
  EXPECT_TRUE(file->read_exactly(4990, data.data(), 10).ok());
  EXPECT_EQ(first_wrong_offset(data.data(), 4990, 10), 5000u);
  EXPECT_TRUE(file->read_exactly(5000, data.data(), 0).ok());
  const Status status = file->read_exactly(4990, data.data(), 11);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kShortRead);
  EXPECT_NE(status.error().text.find("wanted 11 bytes at offset 4990, got 10"), std::string::npos)
      << status.error().text;
  EXPECT_EQ(file->read_exactly(UINT64_MAX - 10, data.data(), 5).error().code, ErrorCode::kDeviceError);
}

TEST(File, NoticesTruncationAndRewriting) {
  TempFolder folder;
  const std::string path = folder.path_of("f");
  write_pattern(path, 0, 5000);
  const auto file = open_file(path, DirectMode::kAuto);
  EXPECT_TRUE(file->check_unchanged().ok());

  // Coarse file system clocks need a moment until a write gets another time.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  write_pattern(path, 100, 1, 1);
  Status status = file->check_unchanged();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kChanged);
  EXPECT_NE(status.error().text.find("written to"), std::string::npos) << status.error().text;

  ASSERT_EQ(::truncate(path.c_str(), 4999), 0);
  status = file->check_unchanged();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().text.find("had 5000 bytes when it was opened and has 4999 now"), std::string::npos)
      << status.error().text;
}

TEST(File, DeletedAndReplacedFileGoesOnBeingRead) {
  TempFolder folder;
  const std::string path = folder.path_of("f");
  write_pattern(path, 0, 8192, 1);
  const auto old_file = open_file(path, DirectMode::kAuto);
  write_pattern(folder.path_of("new"), 0, 8192, 2);
  std::filesystem::rename(folder.path_of("new"), path);
  std::vector<std::byte> data(8192);
  ASSERT_TRUE(old_file->read_exactly(0, data.data(), 8192).ok());
  EXPECT_EQ(first_wrong_offset(data.data(), 0, 8192, 1), 8192u);
  EXPECT_TRUE(old_file->check_unchanged().ok());
  EXPECT_NE(open_file(path, DirectMode::kAuto)->inode(), old_file->inode());
}

TEST(File, ClosesItsDescriptors) {
  TempFolder folder;
  write_pattern(folder.path_of("f"), 0, 8192);
  const auto count_open = [] {
    const std::filesystem::directory_iterator open_files("/proc/self/fd");
    return std::distance(begin(open_files), end(open_files));
  };
  const auto count_before = count_open();
  for (const DirectMode mode : {DirectMode::kAuto, DirectMode::kOff}) open_file(folder.path_of("f"), mode);
  EXPECT_FALSE(File::open("/proc/version", DirectMode::kRequire).ok());
  EXPECT_FALSE(File::open("/dev/null", DirectMode::kAuto).ok());
  EXPECT_EQ(count_open(), count_before);
}

}  // namespace
}  // namespace sluice
