// Reads by a pool of threads that block in pread: the path for kernels and containers without io_uring.
// Reads start when they are submitted; poll and wait only deliver.
//
// Owns     its threads, which block all signals and end with the device.
// Errors   open: kNoMemory when not one thread can be started.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

class PreadDevice : public Device {
 public:
  static constexpr unsigned kThreadsDefaultMax = 8;

  // As many reads are in flight as there are threads: `threads`, or min(depth, kThreadsDefaultMax) when that is 0, and
  // never more than depth.
  static Result<std::unique_ptr<Device>> open(unsigned depth, unsigned threads);
  ~PreadDevice() override;

  void submit(const ReadRequest& request) override;
  bool cancel(uint64_t tag) override;
  void raise(uint64_t tag) override;
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override;
  size_t pending() const override;
  DeviceStats stats() const override;
  std::string name() const override { return "pread"; }

 private:
  PreadDevice() = default;
  void work();
  size_t pending_locked() const { return queue_.queued_count() + queue_.in_flight_count() + finished_.size(); }
  void deliver_locked(std::vector<ReadCompletion>& completions);

  mutable std::mutex mutex_;  // over everything below but the threads; never held across a read
  std::condition_variable work_available_;
  std::condition_variable read_finished_;
  ReadQueue queue_;
  std::vector<ReadCompletion> finished_;  // not yet delivered
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
