#include "io/read_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "io/device.h"

namespace sluice {

ReadProgress::Piece ReadProgress::next_piece() const {
  const uint64_t start = align_down(bytes_done_, align_bytes_);
  return Piece{start, std::min(bytes_ - start, kPieceBytesMax)};
}

void ReadProgress::take(int64_t result) {
  SLUICE_ASSERT(!finished_, "result {} for a read that has finished", result);
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool interrupted = (error == EINTR || error == EAGAIN) && ++interruptions_ <= kInterruptionsMax;
    const bool device_fault = error == EIO && ++device_faults_ <= Device::kRetriesMax;
    if (interrupted || device_fault) {
      ++retries_;
    } else {
      fail(error);
    }
    return;
  }

  const Piece piece = next_piece();
  const uint64_t end = piece.start + static_cast<uint64_t>(result);
  SLUICE_ASSERT(end <= bytes_, "a piece of {} bytes returned {}", piece.bytes, result);
  if (end <= bytes_done_) {
    finished_ = true;
    return;
  }
  bytes_done_ = end;
  interruptions_ = 0;
  const bool piece_was_short = static_cast<uint64_t>(result) < piece.bytes;
  finished_ = bytes_done_ == bytes_ || (piece_was_short && bytes_done_ >= bytes_needed_);
}

void ReadProgress::fail(int system_error) {
  system_error_ = system_error;
  finished_ = true;
}

ReadOutcome ReadProgress::outcome(const std::string& path, uint64_t offset) const {
  SLUICE_ASSERT(finished_, "outcome of a read that has not finished, {} of {} bytes", bytes_done_, bytes_);
  ReadOutcome outcome{Status(), bytes_done_, retries_};
  if (system_error_ != 0) {
    outcome.status = make_system_error(ErrorCode::kDeviceError, system_error_,
                                       "cannot read {} bytes at offset {} of '{}'", bytes_needed_, offset, path);
  } else if (bytes_done_ < bytes_needed_) {
    outcome.status = make_error(ErrorCode::kShortRead, "'{}' ends early: wanted {} bytes at offset {}, got {}", path,
                                bytes_needed_, offset, bytes_done_);
  }
  return outcome;
}

ReadOutcome read_blocking(const BlockingRead& read) {
  ReadProgress progress(read.bytes, read.bytes_needed, read.align_bytes);
  while (!progress.finished()) {
    const ReadProgress::Piece piece = progress.next_piece();
    const ssize_t got =
        ::pread(read.fd, read.destination + piece.start, piece.bytes, static_cast<off_t>(read.offset + piece.start));
    progress.take(got >= 0 ? got : -errno);
  }
  return progress.outcome(*read.path, read.offset);
}

}  // namespace sluice
