// Reads by io_uring. Exists only where the build found liburing (SLUICE_HAVE_URING).
// submit only queues; poll and wait hand reads to the kernel, so that a batch costs one system call.
//
// Entries  each read in flight has exactly one entry with the kernel: its next piece (io/read_progress.h).
// In flight, for the counters, lasts until poll or wait has seen the completion.
// Files    are registered with the ring at their first read, so that the kernel need not look the descriptor up each
//          time; the ring then holds them open until it ends. Where that is refused, and for files beyond the table's
//          kFilesMax places, reads name the descriptor.
// Memory   registered memory is pinned once instead of at each read. It counts against RLIMIT_MEMLOCK; where that is
//          too small, one line says so and reads into it are as any other.
// Failure  open tries a whole round trip through the ring, because sandboxes may allow the setup and refuse the rest:
//          kUnsupported with the reason and what would help. Should the kernel refuse the ring later and for good
//          (kRefusedNsMax), every read fails with kDeviceError: at once if the kernel never got it, else when it has
//          come back, because until then its destination may still be written to. One that is not back after
//          kAbandonNsMax is given up: hanging would be worse.
#pragma once

#ifdef SLUICE_HAVE_URING

#include <liburing.h>

#include <memory>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

class UringDevice : public Device {
 public:
  static constexpr unsigned kFilesMax = 256;
  static constexpr uint64_t kBufferBytesMax = kGiB;  // the kernel's own bound
  static constexpr int64_t kRefusedNsMax = 10'000'000'000;
  static constexpr int64_t kAbandonNsMax = 60'000'000'000;

  static Result<std::unique_ptr<Device>> open(unsigned depth, bool register_files);
  ~UringDevice() override;

  void register_memory(std::span<std::byte> memory) override;
  void submit(const ReadRequest& request) override;
  bool cancel(uint64_t tag) override;
  void raise(uint64_t tag) override;
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override;
  size_t pending() const override { return queue_.queued_count() + queue_.in_flight_count(); }
  DeviceStats stats() const override { return queue_.stats(); }
  std::string name() const override { return "io_uring"; }

 private:
  explicit UringDevice(unsigned depth) : depth_(depth) { prepared_.reserve(depth); }
  Status probe();
  void make_file_table();
  int file_place(const File& file);
  int buffer_place(const std::byte* destination, uint64_t bytes) const;
  void prepare(Read* read);
  void start_queued();
  void enter(unsigned wait_count);
  void reap(std::vector<ReadCompletion>& completions);
  void give_up(int system_error);
  void fail_pending(std::vector<ReadCompletion>& completions);

  unsigned depth_;
  io_uring ring_ = {};
  bool ring_open_ = false;
  ReadQueue queue_;
  size_t file_places_ = 0;                  // of the ring's table; 0 when files are not registered
  std::vector<uint64_t> files_;             // File::serial() by place
  std::span<std::byte> registered_memory_;  // the ring's buffers, kBufferBytesMax each but the last; empty when refused
  std::vector<Read*> prepared_;   // in flight for us, not yet taken by the kernel; in the order of their entries
  int64_t refused_since_ns_ = 0;  // 0: the kernel took the last call
  int broken_error_ = 0;          // errno; not 0: the ring is of no more use
  int64_t broken_since_ns_ = 0;
  bool abandoned_ = false;  // reads were given up that the kernel still has: its completions name dead records
};

}  // namespace sluice

#endif  // SLUICE_HAVE_URING
