// A drive that takes no time and gives no data, to time the computation alone: every read completes at the next poll
// or wait. One byte of each page of the destination is written, so that it is real memory; what stands in the others
// is whatever was there.
//
// Answers  computed from such bytes mean nothing; whoever opens this device must say so.
// Threads  thread-compatible.
#pragma once

#include <string>
#include <vector>

#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

class SyntheticDevice final : public Device {
 public:
  void submit(const ReadRequest& request) override { queue_.push(request); }
  bool cancel(uint64_t tag) override { return queue_.cancel(tag); }
  void raise(uint64_t tag) override { queue_.raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override { poll(completions); }
  size_t pending() const override { return queue_.queued_count(); }
  DeviceStats stats() const override { return queue_.stats(); }
  std::string name() const override { return "synthetic"; }

 private:
  ReadQueue queue_;
};

}  // namespace sluice
