// A drive that this machine does not have, for measurements: reads come from the files as they are (from the page
// cache, if they are there), and end when a drive of a given bandwidth and latency would have ended them. One clock, no
// threads.
//
// Model    up to `depth` reads are in flight; the drive moves one byte after the other, so a read ends when all that
//          started before it and its own bytes have passed, and `latency` later. A read in flight is not overtaken; in
//          the queue, demand goes first. The drive goes on between two calls: a place in flight that came free in
//          between is taken from the time it came free.
// Owns     nothing of the caller's. Errors: those of File::read_exactly.
// Threads  thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "io/device.h"
#include "io/read_queue.h"

namespace sluice {

struct PacedDrive {
  double bytes_per_s = 0;
  int64_t latency_ns = 0;
  unsigned depth = 32;
};
// "BYTES_PER_S,LATENCY_US", as in "2e9,100".
Result<PacedDrive> parse_paced_drive(const std::string& text);

class PacedDevice : public Device {
 public:
  explicit PacedDevice(const PacedDrive& drive) : drive_(drive) {}

  void submit(const ReadRequest& request) override;
  bool cancel(uint64_t tag) override;
  void raise(uint64_t tag) override { queue_.raise(tag); }
  void poll(std::vector<ReadCompletion>& completions) override;
  void wait(std::vector<ReadCompletion>& completions) override;
  size_t pending() const override { return queue_.queued_count() + queue_.in_flight_count(); }
  DeviceStats stats() const override { return queue_.stats(); }
  std::string name() const override { return "paced"; }

 private:
  void start_reads(int64_t since_ns);
  void finish(Read* read, std::vector<ReadCompletion>& completions);

  PacedDrive drive_;
  ReadQueue queue_;
  std::multimap<int64_t, Read*> due_;  // in flight, by the time they end
  int64_t busy_until_ns_ = 0;
};

}  // namespace sluice
