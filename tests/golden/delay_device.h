// A device whose reads take a random time more, up to a given one, as a seed says: what a slow or busy drive does to the
// order in which experts arrive. Everything else is the inner device's.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "io/device.h"

namespace sluice::golden {

class DelayDevice : public Device {
 public:
  DelayDevice(std::unique_ptr<Device> inner, uint64_t seed, int64_t delay_ns_max)
      : random_(seed), delay_ns_max_(delay_ns_max), inner_(std::move(inner)) {}

  void register_memory(std::span<std::byte> memory) override { inner_->register_memory(memory); }
  void submit(const ReadRequest& request) override { inner_->submit(request); }
  bool cancel(uint64_t tag) override { return inner_->cancel(tag); }
  void raise(uint64_t tag) override { inner_->raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override {
    inner_->poll(arrivals_);
    hold_arrivals();
    deliver(completions);
  }
  void wait(std::vector<ReadCompletion>& completions) override {
    const size_t before = completions.size();
    while (completions.size() == before && pending() > 0) {
      if (held_.empty()) {
        inner_->wait(arrivals_);
      } else {
        inner_->poll(arrivals_);
      }
      hold_arrivals();
      const auto next = std::min_element(held_.begin(), held_.end(),
                                         [](const Held& a, const Held& b) { return a.due_ns < b.due_ns; });
      if (next == held_.end()) continue;
      std::this_thread::sleep_for(std::chrono::nanoseconds(next->due_ns - now_ns()));
      deliver(completions);
    }
  }
  size_t pending() const override { return inner_->pending() + held_.size(); }
  DeviceStats stats() const override { return inner_->stats(); }
  std::string name() const override { return "delay(" + inner_->name() + ")"; }

 private:
  struct Held {
    ReadCompletion completion;
    int64_t due_ns = 0;
  };

  void hold_arrivals() {
    for (ReadCompletion& arrival : arrivals_) {
      const auto delay_ns = static_cast<int64_t>(random_() % static_cast<uint64_t>(delay_ns_max_ + 1));
      held_.push_back({std::move(arrival), now_ns() + delay_ns});
    }
    arrivals_.clear();
  }
  void deliver(std::vector<ReadCompletion>& completions) {
    const int64_t now = now_ns();
    const auto due = std::partition(held_.begin(), held_.end(), [&](const Held& held) { return held.due_ns > now; });
    for (auto it = due; it != held_.end(); ++it) completions.push_back(std::move(it->completion));
    held_.erase(due, held_.end());
  }

  std::mt19937_64 random_;
  const int64_t delay_ns_max_;
  std::vector<Held> held_;
  std::vector<ReadCompletion> arrivals_;
  std::unique_ptr<Device> inner_;  // ends first: its reads in flight are done with their destinations then
};

}  // namespace sluice::golden
