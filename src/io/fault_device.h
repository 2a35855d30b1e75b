// A device that lies, for tests: wraps another one and makes its reads late, out of order, short, failed or wrong, as a
// seed says. It keeps the contract of io/device.h in everything but the bytes of a corrupted read.
//
// Seed     a read's fate is drawn when it is submitted, so it depends on the seed and on the order of submissions, not
//          on the inner device's timing. Delays are counted in calls of poll and wait, not in time: a schedule over a
//          MemoryDevice repeats exactly.
// Failed   reads have their destination overwritten, so that a user of such bytes shows.
// Owns     the inner device.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "io/device.h"

namespace sluice {

// Probabilities are per read, 0 to 1. Of the last three at most one befalls a read, tried in this order.
struct FaultOptions {
  uint64_t seed = 0;
  double delay = 0;      // the completion is held back for 1 to delay_calls_max calls
  double reorder = 0;    // completions due at the same call change places, per call
  double cut_short = 0;  // the file seems to end early: kShortRead
  double fail = 0;       // kDeviceError with EIO, as after the retries
  double corrupt = 0;    // one byte of bytes_needed differs, and the status is ok
  unsigned delay_calls_max = 8;
};

struct FaultCounts {
  uint64_t delayed = 0;
  uint64_t reordered = 0;  // calls whose completions changed places
  uint64_t cut_short = 0;
  uint64_t failed = 0;
  uint64_t corrupted = 0;
};

class FaultDevice : public Device {
 public:
  FaultDevice(std::unique_ptr<Device> inner, const FaultOptions& options);
  // Ends the inner device first: its reads in flight are done with their destinations then.
  ~FaultDevice() override = default;

  void register_memory(std::span<std::byte> memory) override { inner_->register_memory(memory); }
  void submit(const ReadRequest& request) override;
  bool cancel(uint64_t tag) override;
  void raise(uint64_t tag) override;
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override;
  size_t pending() const override { return inner_->pending() + held_.size(); }
  // The inner device's, with the injected failures among the errors.
  DeviceStats stats() const override;
  std::string name() const override;

  const FaultCounts& fault_counts() const { return counts_; }

 private:
  enum class Damage : uint8_t { kNone, kCutShort, kFail, kCorrupt };
  struct Fate {
    ReadRequest request;
    Damage damage = Damage::kNone;
    uint64_t place = 0;  // the byte that is hit, or where the read is cut; < bytes_needed
    uint64_t delay_calls = 0;
  };
  struct Held {
    ReadCompletion completion;
    uint64_t due_call = 0;
  };

  bool chance(double probability);
  void take_arrivals();
  void inflict(const Fate& fate, ReadCompletion& completion);
  void deliver(std::vector<ReadCompletion>& completions);

  FaultOptions options_;
  std::mt19937_64 fates_;   // drawn from by submit only
  std::mt19937_64 orders_;  // drawn from at delivery
  uint64_t call_ = 0;
  std::unordered_map<uint64_t, Fate> fate_of_tag_;  // reads that the inner device still has
  std::vector<Held> held_;
  std::vector<ReadCompletion> arrivals_;
  FaultCounts counts_;
  std::unique_ptr<Device> inner_;
};

}  // namespace sluice
