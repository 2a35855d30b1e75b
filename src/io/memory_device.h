// A device without time: reads happen inside poll and wait, on the caller's thread, in the contract's order, so that a
// test sees the same schedule every time. Not for use in the engine.
// It reads through the page cache and asks no alignment beyond the file's own.
#pragma once

#include <limits>
#include <vector>

#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

class MemoryDevice : public Device {
 public:
  // Each poll or wait carries out at most this many reads; the rest stay queued, and can be cancelled and raised.
  explicit MemoryDevice(size_t reads_per_call_max = std::numeric_limits<size_t>::max());

  void submit(const ReadRequest& request) override { queue_.push(request); }
  bool cancel(uint64_t tag) override { return queue_.cancel(tag); }
  void raise(uint64_t tag) override { queue_.raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override { poll(completions); }
  size_t pending() const override { return queue_.queued_count(); }
  DeviceStats stats() const override { return queue_.stats(); }
  std::string name() const override { return "memory"; }

 private:
  size_t reads_per_call_max_;  // > 0
  ReadQueue queue_;
};

}  // namespace sluice
