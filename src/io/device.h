// Asynchronous positional reads into the caller's memory: the seam between the engine and the drive, and the place
// where a test stands in for it. Knows nothing of experts or slots.
//
// Life of a read   submit -> queued -> in flight -> one Completion from poll or wait.
//                  A queued read may be cancelled (it then has no Completion) or raised to demand.
// Order            demand reads start before queued prefetch reads; within a priority first come, first started.
//                  Completions arrive in any order.
// Alignment        offset, bytes and destination are multiples of the file's align_bytes(). The last block of a file
//                  may reach past its end: bytes_needed says how many bytes must really be there.
// Faults           EINTR and EAGAIN are retried, a short read is continued, EIO is retried kRetriesMax times, then the
//                  Completion carries kDeviceError with file, offset, length and errno. An early end of the file is
//                  kShortRead with wanted and got. A failed read leaves the destination's contents undefined.
// Owns             nothing of the caller's: file and destination must live until the Completion, a successful cancel,
//                  or the device's destruction (which waits for reads in flight).
// Threads          thread-compatible: one caller at a time. Implementations may have threads of their own inside.
// Cost             submit, cancel and raise are O(1) amortised and do not block; nothing is allocated per read once
//                  the queues have grown to their working size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/file.h"
#include "trace/engine_stats.h"

namespace sluice {

enum class ReadPriority : uint8_t { kDemand, kPrefetch };

struct ReadRequest {
  const File* file = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;         // > 0
  uint64_t bytes_needed = 0;  // 0 < bytes_needed <= bytes
  std::byte* destination = nullptr;
  uint64_t tag = 0;  // the caller's name for the read, unique among the reads that are not yet completed
  ReadPriority priority = ReadPriority::kDemand;
};

struct ReadCompletion {
  uint64_t tag = 0;
  Status status;
  int64_t latency_ns = 0;  // from submit to completion
};

// Totals since construction. Counts of reads are requests, not the pieces they may have been split into.
struct DeviceStats {
  uint64_t reads = 0;      // completed, failed ones included
  uint64_t bytes = 0;      // bytes that arrived
  uint64_t retries = 0;    // repeated after EIO, EINTR or EAGAIN
  uint64_t errors = 0;     // reads that failed for good
  uint64_t cancelled = 0;  // dropped from the queue
  int64_t busy_ns = 0;     // time during which at least one read was in flight
};

class Device {
 public:
  static constexpr int kRetriesMax = 3;

  virtual ~Device() = default;

  // A hint, at most once: many reads will land in this memory, which lives as long as the device. Where the path can
  // pin it once for all reads and may, it does; it is touched and cannot be paged out from then on.
  virtual void register_memory(std::span<std::byte> /*memory*/) {}

  virtual void submit(const ReadRequest& request) = 0;
  // True when the read was still queued: it is dropped and has no Completion. False when it has started or is unknown.
  virtual bool cancel(uint64_t tag) = 0;
  // Makes a queued prefetch read a demand read; nothing happens to reads that have started.
  virtual void raise(uint64_t tag) = 0;

  // Appends the reads that have completed since the last call; never blocks. Also starts queued reads.
  virtual void poll(std::vector<ReadCompletion>& completions) = 0;
  // As poll, but blocks until there is at least one completion. Returns at once when nothing is pending.
  virtual void wait(std::vector<ReadCompletion>& completions) = 0;

  // Reads that were submitted and neither delivered nor cancelled.
  virtual size_t pending() const = 0;
  virtual DeviceStats stats() const = 0;
  // By drive, where the reads go to copies on several.
  virtual std::vector<DriveStats> drive_stats() const { return {}; }
  virtual std::string name() const = 0;  // "io_uring", "pread", "synthetic", "memory", "fault(io_uring)"
};

enum class IoPath { kAuto, kUring, kPread, kSynthetic };
Result<IoPath> parse_io_path(const std::string& text);  // "auto", "io_uring", "pread", "synthetic"

struct DeviceOptions {
  static constexpr unsigned kDepthMax = 4096;

  IoPath path = IoPath::kAuto;
  unsigned depth = 32;         // reads in flight at once, 1 to kDepthMax
  unsigned threads = 0;        // of the pread pool; 0: min(depth, 8)
  bool register_files = true;  // with io_uring's ring; off only to measure what it brings
};

// io_uring where the kernel allows it, else the pread pool with one line that names the reason. A path that was
// asked for by name and cannot be had is kUnsupported; a depth out of range is kBadArgument.
Result<std::unique_ptr<Device>> open_device(const DeviceOptions& options);

}  // namespace sluice
