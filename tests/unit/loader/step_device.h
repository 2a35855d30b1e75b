// Devices that stand in for a drive in the prefetch tests. StepDevice does nothing until it is waited for, and then
// ends one read, in the order that io/device.h promises. PrefetchFails lets every read fail that was submitted as a
// prefetch.
#pragma once

#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

class StepDevice : public Device {
 public:
  void submit(const ReadRequest& request) override {
    queue_.push(request);
    submitted_.emplace_back(request.file, request.offset);
  }
  bool cancel(uint64_t tag) override { return queue_.cancel(tag); }
  void raise(uint64_t tag) override { queue_.raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override {
    for (; steps_ > 0; --steps_) step(completions);
  }
  void wait(std::vector<ReadCompletion>& completions) override { step(completions); }
  size_t pending() const override { return queue_.queued_count(); }
  DeviceStats stats() const override { return queue_.stats(); }
  std::string name() const override { return "step"; }

  // The next poll ends so many reads.
  void let(size_t steps) { steps_ = steps; }
  // Every read that was ever submitted: file and offset.
  const std::vector<std::pair<const File*, uint64_t>>& submitted() const { return submitted_; }

 private:
  void step(std::vector<ReadCompletion>& completions) {
    Read* read = queue_.start_next();
    if (read == nullptr) return;
    const ReadRequest& request = read->request;
    const Status status = request.file->read_exactly(request.offset, request.destination, request.bytes_needed);
    completions.push_back(queue_.finish(read, {status, request.bytes_needed}));
  }

  ReadQueue queue_;
  size_t steps_ = 0;
  std::vector<std::pair<const File*, uint64_t>> submitted_;
};

class PrefetchFails : public Device {
 public:
  explicit PrefetchFails(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}

  void submit(const ReadRequest& request) override {
    if (request.priority == ReadPriority::kPrefetch) prefetches_.insert(request.tag);
    inner_->submit(request);
  }
  bool cancel(uint64_t tag) override {
    const bool cancelled = inner_->cancel(tag);
    if (cancelled) prefetches_.erase(tag);
    return cancelled;
  }
  void raise(uint64_t tag) override { inner_->raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override { inner_->poll(completions), spoil(completions); }
  void wait(std::vector<ReadCompletion>& completions) override { inner_->wait(completions), spoil(completions); }
  size_t pending() const override { return inner_->pending(); }
  DeviceStats stats() const override { return inner_->stats(); }
  std::string name() const override { return "prefetch fails"; }

 private:
  void spoil(std::vector<ReadCompletion>& completions) {
    for (ReadCompletion& completion : completions) {
      if (prefetches_.erase(completion.tag) == 0) continue;
      completion.status = make_error(ErrorCode::kDeviceError, "a prefetch that fails");
    }
  }

  std::set<uint64_t> prefetches_;
  std::unique_ptr<Device> inner_;
};

}  // namespace sluice
