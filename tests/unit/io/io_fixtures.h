// What the tests of io/ share: a folder that goes away, files whose every byte is known from its offset, aligned
// memory, and running a device until it has nothing left.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "io/device.h"
#include "io/file.h"

namespace sluice {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = testing::TempDir() + "/sluice_io_XXXXXX";
    SLUICE_ASSERT(::mkdtemp(pattern.data()) != nullptr, "no folder for the test");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }

  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path target = path_of(name);
    std::filesystem::create_directories(target.parent_path());
    std::ofstream(target, std::ios::binary) << text;
  }

 private:
  std::string path_;
};

// The byte that a pattern file of this salt has at this offset: no two blocks look alike.
inline std::byte pattern_byte(uint64_t offset, uint64_t salt = 0) {
  uint64_t mixed = (offset / 8 + 1) * 0x9E3779B97F4A7C15u + salt * 0xD1B54A32D192ED03u;
  mixed ^= mixed >> 29;
  mixed *= 0xBF58476D1CE4E5B9u;
  return static_cast<std::byte>(mixed >> (8 * (offset % 8)));
}

// Writes pattern bytes [offset, offset + bytes) into the file, which is made if need be.
inline void write_pattern(const std::string& path, uint64_t offset, uint64_t bytes, uint64_t salt = 0) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0) << path;
  std::vector<std::byte> data(bytes);
  for (uint64_t i = 0; i < bytes; ++i) data[i] = pattern_byte(offset + i, salt);
  ASSERT_EQ(::pwrite(fd, data.data(), bytes, static_cast<off_t>(offset)), static_cast<ssize_t>(bytes));
  ::close(fd);
}

struct AlignedFree {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;

inline AlignedBytes aligned_bytes(uint64_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(4096, align_up(bytes, 4096))));
}

// The first offset, from `offset` on, at which the bytes are not the pattern's; offset + bytes when all are.
inline uint64_t first_wrong_offset(const std::byte* data, uint64_t offset, uint64_t bytes, uint64_t salt = 0) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (data[i] != pattern_byte(offset + i, salt)) return offset + i;
  }
  return offset + bytes;
}

inline std::shared_ptr<const File> open_file(const std::string& path, DirectMode mode) {
  auto file = File::open(path, mode);
  SLUICE_ASSERT(file.ok(), "{}", file.error().message());
  return file.value();
}

// Waits until nothing is pending. Each wait must bring something.
inline std::vector<ReadCompletion> drain(Device& device) {
  std::vector<ReadCompletion> completions;
  while (device.pending() > 0) {
    const size_t count_before = completions.size();
    device.wait(completions);
    if (completions.size() == count_before) {
      ADD_FAILURE() << "wait returned nothing with " << device.pending() << " reads pending";
      break;
    }
  }
  return completions;
}

}  // namespace sluice
