// What has become of one read so far, and what to do next: the rules of io/device.h for short reads, interruptions,
// device faults and the end of the file, written once for every device. Makes no system call itself, except in
// read_blocking.
//
// A read is done in pieces: take next_piece(), read it by whatever means, give the result to take(), until finished().
// A direct read that stopped inside a block is continued from that block's start, because the drive takes no other
// offset; a piece that brings nothing new is the end of the file.
//
// Threads  thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/result.h"

namespace sluice {

// How a read ended. `bytes` arrived, `retries` pieces were repeated after EIO, EINTR or EAGAIN.
struct ReadOutcome {
  Status status;
  uint64_t bytes = 0;
  uint64_t retries = 0;
};

class ReadProgress {
 public:
  // The kernel stops a read just below 2 GiB; pieces stay aligned and well below that.
  static constexpr uint64_t kPieceBytesMax = kGiB;
  // Interruptions in a row without a byte between them. Far above what signals do; it only bounds a broken driver.
  static constexpr int kInterruptionsMax = 10000;

  struct Piece {
    uint64_t start = 0;  // from the start of the read, a multiple of align_bytes
    uint64_t bytes = 0;
  };

  ReadProgress() = default;
  // As in ReadRequest; align_bytes is a power of two that divides `bytes`.
  ReadProgress(uint64_t bytes, uint64_t bytes_needed, uint64_t align_bytes)
      : bytes_(bytes), bytes_needed_(bytes_needed), align_bytes_(align_bytes) {}

  bool finished() const { return finished_; }
  Piece next_piece() const;
  // `result` is what reading next_piece() returned: a count of bytes, or a negative errno.
  void take(int64_t result);
  // Ends the read with this errno.
  void fail(int system_error);

  // Of a finished read. The path and the read's offset are for the error's text.
  ReadOutcome outcome(const std::string& path, uint64_t offset) const;

 private:
  uint64_t bytes_ = 0;
  uint64_t bytes_needed_ = 0;
  uint64_t align_bytes_ = 1;
  uint64_t bytes_done_ = 0;
  uint64_t retries_ = 0;
  int interruptions_ = 0;  // since the last byte arrived
  int device_faults_ = 0;  // EIO
  int system_error_ = 0;   // that ended the read
  bool finished_ = false;
};

struct BlockingRead {
  int fd = -1;
  const std::string* path = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t bytes_needed = 0;
  uint64_t align_bytes = 1;
  std::byte* destination = nullptr;
};

// The whole life of a read with pread. Blocks.
ReadOutcome read_blocking(const BlockingRead& read);

}  // namespace sluice
