// One model on several drives: a device that sends each read to the copy that should finish it first.
// Chooses by what it measured; knows nothing of models. The copies were compared before (store/model_copy.h).
//
// Drives   drive 0 holds the primary files, which requests name; each other drive holds a copy of every one of them.
//          All go through one inner device, whose depth should be that of one drive times their number.
// Choice   (bytes queued on the drive + the read's own) / the drive's speed, the smallest wins. Speed is an exponential
//          average of bytes per second between arrivals. An arrival that a blocking wait saw is exact; one that a poll
//          found may be older, so it can raise the average but not lower it. A drive that has had nothing to do for
//          long gets a read now and then, so that its speed is not remembered from a bad moment for ever.
// Faults   a read that fails is repeated on the other drives before it is an error; the error is then the first one.
//          A drive whose reads fail kFailuresMax times in a row, or whose copy is changed underneath, is dropped for
//          the rest of the run with one line. The primary drive still gets what no other can read.
// Owns     the inner device and its share of the files.
// Threads  as every device: one caller at a time.
// Cost     as io/device.h, and an fstat before and after each read of a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/device.h"

namespace sluice {

struct MirroredFile {
  std::shared_ptr<const File> primary;              // aligned to the greatest alignment of all
  std::vector<std::shared_ptr<const File>> copies;  // on drives 1, 2, ...
};

class MirrorDevice : public Device {
 public:
  static constexpr size_t kDrivesMax = 16;
  static constexpr unsigned kFailuresMax = 3;
  static constexpr double kSpeedBlend = 0.2;  // of the newest sample
  // An idle drive is tried again after this time, or after kRetryShare times what the read will take there.
  static constexpr int64_t kRetryNs = 250'000'000;
  static constexpr double kRetryShare = 20;

  // `drives` names them for lines and figures.
  MirrorDevice(std::unique_ptr<Device> inner, std::vector<std::string> drives, std::vector<MirroredFile> files);

  void register_memory(std::span<std::byte> memory) override { inner_->register_memory(memory); }
  void submit(const ReadRequest& request) override;
  bool cancel(uint64_t tag) override;
  void raise(uint64_t tag) override { inner_->raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override;
  size_t pending() const override { return inner_->pending(); }
  // A read that was repeated on another drive is one read with a retry; an error only when all drives failed.
  DeviceStats stats() const override;
  std::vector<DriveStats> drive_stats() const override;
  std::string name() const override { return inner_->name(); }

 private:
  struct Drive {
    DriveStats stats;
    uint64_t queued_bytes = 0;
    double bytes_per_ns = 0;    // 0: not known yet
    int64_t busy_since_ns = 0;  // the last arrival, or the start of the first read after a pause
    int64_t chosen_ns = 0;
    unsigned failures_in_a_row = 0;
    uint64_t arrived_bytes = 0;  // in the batch that is being taken
  };
  struct Flight {
    ReadRequest request;                 // as the caller gave it
    const MirroredFile* file = nullptr;  // null: a file that has no copies
    size_t drive = 0;
    uint32_t tried = 0;  // bit per drive
    int64_t submitted_ns = 0;
    Status first_error;
  };
  using Flights = std::unordered_map<uint64_t, Flight>;

  std::optional<size_t> choose(const Flight& flight, int64_t now) const;
  double expected_ns(const Drive& drive, uint64_t bytes) const;
  bool start(Flight& flight);
  void take_arrivals(bool exact, std::vector<ReadCompletion>& completions);
  void learn(Drive& drive, int64_t now, bool exact);
  void drop(size_t drive, const Error& reason);

  std::vector<Drive> drives_;
  std::vector<MirroredFile> files_;
  std::unordered_map<const File*, const MirroredFile*> file_of_primary_;
  Flights flights_;  // by tag
  std::vector<Flights::node_type> spare_;
  std::vector<ReadCompletion> arrivals_;
  uint64_t repeated_ = 0;
  uint64_t failed_ = 0;
  std::unique_ptr<Device> inner_;  // last, so that its reads end before the files close
};

}  // namespace sluice
