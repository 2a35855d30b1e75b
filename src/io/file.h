// One open file of a model, for positional reads: how it was opened, what a read of it must be aligned to, and
// whether it still is the file that was opened. Reads nothing itself (io/device.h does), except for the probe.
//
// Direct I/O is tried with a real read when the file is opened, because some file systems accept the flag and then
// refuse every read. The alignment is statx's (STATX_DIOALIGN), else 4096.
//
// Units    offsets and sizes are bytes from the start of the file, 64 bits everywhere.
// Owns     its descriptor until destruction. A replaced or deleted file goes on being read through it.
// Errors   kNotFound, kUnsupported (direct I/O demanded and not to be had), kBadFile (not a regular file), kChanged.
// Threads  const after open: any thread may use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace sluice {

enum class DirectMode {
  kAuto,     // direct where a probe read works, else buffered with one line that names the reason
  kRequire,  // direct, or kUnsupported
  kOff,      // buffered, through the page cache
};
Result<DirectMode> parse_direct_mode(const std::string& text);  // "auto", "on", "off"

class File {
 public:
  static Result<std::shared_ptr<const File>> open(const std::string& path, DirectMode mode);

  // Another handle of the very same open file, whose reads are aligned to this power of two at least: for reads that
  // must suit a copy on another drive too.
  Result<std::shared_ptr<const File>> aligned_to(uint64_t align_bytes) const;

  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t device() const { return device_; }
  uint64_t inode() const { return inode_; }
  bool direct() const { return direct_; }

  // Of this File alone, in this process: tells it from a later one that has its address or descriptor.
  uint64_t serial() const { return serial_; }

  // What offset, length and memory address of a read must be multiples of. 1 when buffered.
  uint64_t align_bytes() const { return align_bytes_; }

  // kChanged, with what changed, when size or modification time are no longer those at open. One fstat.
  Status check_unchanged() const;

  // Blocking buffered read of exactly `bytes` bytes, for headers and checks; no alignment asked. kShortRead at the
  // end of the file, kDeviceError otherwise.
  Status read_exactly(uint64_t offset, void* destination, uint64_t bytes) const;

 private:
  File();

  std::string path_;
  uint64_t serial_;
  int fd_ = -1;           // what devices read from; O_DIRECT when direct_
  int buffered_fd_ = -1;  // for read_exactly; equals fd_ when not direct_
  uint64_t size_bytes_ = 0;
  uint64_t device_ = 0;
  uint64_t inode_ = 0;
  int64_t modified_ns_ = 0;
  bool direct_ = false;
  uint64_t align_bytes_ = 1;
};

// Makes room for this many more files, each with up to two descriptors, as far as the process may.
void raise_descriptor_limit(uint64_t n_files);

}  // namespace sluice
