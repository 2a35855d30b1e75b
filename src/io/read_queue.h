// The reads of one device: which wait, in which order they start, which are in flight, and the device's counters.
// The part of every device that is the same; how a started read is carried out is the device's own affair.
//
// States   push -> queued (demand or prefetch) -> start_next -> in flight -> finish;  queued -> cancel -> gone.
// Owns     the Read records. A Read is valid from start_next to its finish.
// Threads  thread-compatible: a device with threads guards its queue with its own mutex.
// Cost     O(1) per call. Records are recycled: nothing is allocated once the table has grown to its working size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "io/device.h"
#include "io/read_progress.h"

namespace sluice {

struct Read {
  ReadRequest request;
  ReadProgress progress;  // for devices that are called back between pieces
  int64_t submitted_ns = 0;

 private:
  friend class ReadQueue;
  enum class State : uint8_t { kQueued, kInFlight };
  State state_ = State::kQueued;
  Read* previous_ = nullptr;  // in the list that the state and the request's priority name
  Read* next_ = nullptr;
};

class ReadQueue {
 public:
  // Asserts what io/device.h asks of a request.
  void push(const ReadRequest& request);
  bool cancel(uint64_t tag);
  void raise(uint64_t tag);

  // The read whose turn it is, now in flight; null when none is queued.
  Read* start_next();
  // Some read in flight; null when there is none.
  Read* find_in_flight() const { return in_flight_.first; }
  // Counts the outcome and lets the record go.
  ReadCompletion finish(Read* read, const ReadOutcome& outcome);

  size_t queued_count() const { return demand_.count + prefetch_.count; }
  size_t in_flight_count() const { return in_flight_.count; }
  DeviceStats stats() const;

 private:
  struct List {
    Read* first = nullptr;
    Read* last = nullptr;
    size_t count = 0;

    void push_back(Read* read);
    void remove(Read* read);
  };
  using Table = std::unordered_map<uint64_t, Read>;

  Read* find_queued(uint64_t tag);
  List& list_of(ReadPriority priority) { return priority == ReadPriority::kDemand ? demand_ : prefetch_; }
  void forget(uint64_t tag);

  Table reads_;  // by tag, queued and in flight
  std::vector<Table::node_type> spare_;
  List demand_;
  List prefetch_;
  List in_flight_;
  DeviceStats stats_;
  int64_t busy_since_ns_ = 0;  // while something is in flight
};

}  // namespace sluice
