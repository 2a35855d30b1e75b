#include "io/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>

#include "base/bytes.h"
#include "base/log.h"
#include "io/read_progress.h"

namespace sluice {

namespace {

constexpr uint64_t kAlignBytesDefault = 4096;
constexpr uint64_t kAlignBytesMax = kMiB;

int64_t modified_ns(const struct stat& info) {
  return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + int64_t{info.st_mtim.tv_nsec};
}

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

// What the file system says a direct read must be aligned to; 0 when it says that there are no direct reads.
uint64_t direct_align_bytes([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx info = {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    const uint64_t align = std::max<uint64_t>(info.stx_dio_offset_align, info.stx_dio_mem_align);
    if (info.stx_dio_offset_align == 0) return 0;
    if (is_power_of_two(align) && align <= kAlignBytesMax) return align;
  }
#endif
  return kAlignBytesDefault;
}

// One block, read directly. Empty when it arrived, else why not.
std::optional<std::string> probe_block(int fd, std::byte* block, uint64_t offset, uint64_t bytes, uint64_t wanted) {
  ssize_t got = 0;
  do {
    got = ::pread(fd, block, bytes, static_cast<off_t>(offset));
  } while (got < 0 && errno == EINTR);
  if (got < 0) return fmt::format("a direct read failed: {}", errno_text(errno));
  if (static_cast<uint64_t>(got) == wanted) return std::nullopt;
  return fmt::format("a direct read of {} bytes at offset {} returned {}", wanted, offset, got);
}

// The two reads that a file system with other wishes than it says would refuse: one whose address and offset are
// aligned as promised and no better, and the last block, which the file may fill only partly.
std::optional<std::string> probe_direct_reads(int fd, uint64_t align_bytes, uint64_t size_bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(2 * align_bytes, 2 * align_bytes));
  if (memory == nullptr) return "no memory for a block";
  const uint64_t first = size_bytes > align_bytes ? align_bytes : 0;
  const uint64_t last = size_bytes > 0 ? align_down(size_bytes - 1, align_bytes) : 0;
  std::optional<std::string> refusal;
  for (const uint64_t offset : {first, last}) {
    const uint64_t wanted = std::min(align_bytes, size_bytes - offset);
    refusal = probe_block(fd, memory + align_bytes, offset, align_bytes, wanted);
    if (refusal) break;
  }
  std::free(memory);
  return refusal;
}

ErrorCode code_of_open_error(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM ? ErrorCode::kDeviceError : ErrorCode::kNotFound;
}

}  // namespace

Result<DirectMode> parse_direct_mode(const std::string& text) {
  if (text == "auto") return DirectMode::kAuto;
  if (text == "on") return DirectMode::kRequire;
  if (text == "off") return DirectMode::kOff;
  return make_error(ErrorCode::kBadArgument, "direct I/O: wanted auto, on or off, given '{}'", text);
}

File::File() {
  static std::atomic<uint64_t> count = 0;
  serial_ = ++count;
}

Result<std::shared_ptr<const File>> File::open(const std::string& path, DirectMode mode) {
  std::shared_ptr<File> file(new File);
  file->path_ = path;
  // O_NONBLOCK only so that opening a pipe by mistake does not hang; reads are meant to wait.
  file->buffered_fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file->buffered_fd_ < 0) {
    const int error = errno;
    return make_system_error(code_of_open_error(error), error, "cannot open '{}'", path);
  }
  file->fd_ = file->buffered_fd_;
  struct stat info = {};
  if (::fstat(file->fd_, &info) != 0) {
    return make_system_error(ErrorCode::kDeviceError, errno, "cannot learn the size of '{}'", path);
  }
  if (!S_ISREG(info.st_mode)) return make_error(ErrorCode::kBadFile, "'{}' is not a regular file", path);
  if (::fcntl(file->fd_, F_SETFL, O_RDONLY) != 0) {
    return make_system_error(ErrorCode::kDeviceError, errno, "cannot set '{}' to blocking reads", path);
  }
  file->size_bytes_ = static_cast<uint64_t>(info.st_size);
  file->device_ = info.st_dev;
  file->inode_ = info.st_ino;
  file->modified_ns_ = modified_ns(info);
  if (mode == DirectMode::kOff) return std::shared_ptr<const File>(std::move(file));

  std::optional<std::string> refusal;
  const int direct_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
  if (direct_fd < 0) {
    refusal = fmt::format("opening for direct reads failed: {}", errno_text(errno));
  } else {
    // From here on the destructor closes both.
    file->fd_ = direct_fd;
    struct stat direct_info = {};
    if (::fstat(direct_fd, &direct_info) != 0 || direct_info.st_dev != info.st_dev ||
        direct_info.st_ino != info.st_ino) {
      return make_error(ErrorCode::kChanged, "'{}' was replaced while it was being opened", path);
    }
    uint64_t align_bytes = direct_align_bytes(direct_fd);
    if (align_bytes == 0) {
      refusal = "the file system has no direct reads for this file";
    } else if (::fcntl(direct_fd, F_SETFL, O_RDONLY | O_DIRECT) != 0) {
      refusal = fmt::format("the descriptor refused direct reads: {}", errno_text(errno));
    } else {
      refusal = probe_direct_reads(direct_fd, align_bytes, file->size_bytes_);
      // Some ask for whole pages and say otherwise.
      if (refusal && align_bytes < kAlignBytesDefault) {
        align_bytes = kAlignBytesDefault;
        refusal = probe_direct_reads(direct_fd, align_bytes, file->size_bytes_);
      }
    }
    if (!refusal) {
      file->direct_ = true;
      file->align_bytes_ = align_bytes;
      return std::shared_ptr<const File>(std::move(file));
    }
    ::close(direct_fd);
    file->fd_ = file->buffered_fd_;
  }

  if (mode == DirectMode::kRequire) {
    return make_error(ErrorCode::kUnsupported, "direct I/O was asked for, but not for '{}': {}", path, *refusal);
  }
  // By folder, so that the parts of a split model give one line.
  log_warning_once("no direct I/O in '{}' ({}): files there are read through the page cache",
                   std::filesystem::path(path).parent_path().string(), *refusal);
  return std::shared_ptr<const File>(std::move(file));
}

Result<std::shared_ptr<const File>> File::aligned_to(uint64_t align_bytes) const {
  std::shared_ptr<File> file(new File);
  const auto duplicate = [](int fd) { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); };
  file->path_ = path_;
  file->size_bytes_ = size_bytes_;
  file->device_ = device_;
  file->inode_ = inode_;
  file->modified_ns_ = modified_ns_;
  file->direct_ = direct_;
  file->align_bytes_ = std::max(align_bytes_, align_bytes);
  file->buffered_fd_ = duplicate(buffered_fd_);
  file->fd_ = file->buffered_fd_ < 0 || fd_ == buffered_fd_ ? file->buffered_fd_ : duplicate(fd_);
  if (file->fd_ < 0) return make_system_error(ErrorCode::kDeviceError, errno, "cannot open '{}' once more", path_);
  return std::shared_ptr<const File>(std::move(file));
}

File::~File() {
  if (fd_ != buffered_fd_ && fd_ >= 0) ::close(fd_);
  if (buffered_fd_ >= 0) ::close(buffered_fd_);
}

Status File::check_unchanged() const {
  struct stat info = {};
  if (::fstat(fd_, &info) != 0) {
    return make_system_error(ErrorCode::kDeviceError, errno, "cannot learn the size of '{}'", path_);
  }
  const uint64_t size_now = static_cast<uint64_t>(info.st_size);
  if (size_now != size_bytes_) {
    return make_error(ErrorCode::kChanged, "'{}' had {} bytes when it was opened and has {} now", path_, size_bytes_,
                      size_now);
  }
  if (modified_ns(info) != modified_ns_) {
    return make_error(ErrorCode::kChanged, "'{}' was written to after it had been opened", path_);
  }
  return Status();
}

Status File::read_exactly(uint64_t offset, void* destination, uint64_t bytes) const {
  if (bytes == 0) return Status();
  return read_blocking({.fd = buffered_fd_,
                        .path = &path_,
                        .offset = offset,
                        .bytes = bytes,
                        .bytes_needed = bytes,
                        .align_bytes = 1,
                        .destination = static_cast<std::byte*>(destination)})
      .status;
}

void raise_descriptor_limit(uint64_t n_files) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  // Beside those that the process had room for before.
  const rlim_t wanted = limit.rlim_cur + 2 * n_files;
  limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? wanted : std::min(wanted, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace sluice
