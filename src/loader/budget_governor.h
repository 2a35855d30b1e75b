// How large the expert pool may be while a model runs: follows what the machine and its container have left. Pure: what
// was measured and when goes in, a size comes out; somebody else measures (io/system_memory.h) and resizes (pool/).
//
// Shrinks  at once, when less than the reserve is left: by what is missing up to one and a half reserves, before the
//          kernel takes page cache and anonymous memory by its own choice.
//          A sixteenth at a time, when tasks wait for memory although there seems to be enough (weights that are mapped
//          are page cache, which counts as available): a tenth of the time between two looks, twice in a row. Not below
//          half of the largest size then, and other cgroups' waiting counts only while little is left.
// Grows    slowly: a quiet time after the last shrinking, while more than two reserves are left, by at most half of
//          what is above them and a thirty-second of the largest size a second.
// Between one and two reserves nothing changes, so it does not swing.
// Units    bytes; times in ns of any steady clock.
// Threads  thread-compatible.
#pragma once

#include <cstdint>

namespace sluice {

struct GovernorOptions {
  uint64_t pool_bytes_max = 0;  // the size at the start
  uint64_t pool_bytes_min = 0;
  uint64_t reserve_bytes = 0;  // what shall stay available to everybody

  static constexpr int64_t kLookIntervalNs = 200'000'000;
};

// A reserve for what was available when the model had been loaded: a thirty-second of it, 8 MiB to 256 MiB.
uint64_t governor_reserve_bytes(uint64_t available_bytes);

struct GovernorInput {
  int64_t now_ns = 0;
  uint64_t available_bytes = 0;
  uint64_t stalled_us = 0;  // a running total
  bool stalls_are_own = false;
};

class BudgetGovernor {
 public:
  explicit BudgetGovernor(const GovernorOptions& options) : options_(options), pool_bytes_(options.pool_bytes_max) {}

  // True when it is time for the next update.
  bool is_due(int64_t now_ns) const {
    return last_look_ns_ == kNever || now_ns - last_look_ns_ >= GovernorOptions::kLookIntervalNs;
  }
  // The size that the pool shall have from now on.
  uint64_t update(const GovernorInput& input);

  uint64_t pool_bytes() const { return pool_bytes_; }
  uint64_t shrinks() const { return shrinks_; }
  uint64_t grows() const { return grows_; }

 private:
  static constexpr int64_t kNever = INT64_MIN;

  bool tasks_wait(const GovernorInput& input);
  void shrink_to(uint64_t bytes, int64_t now_ns);

  const GovernorOptions options_;
  uint64_t pool_bytes_;
  int64_t last_look_ns_ = kNever;
  int64_t last_shrink_ns_ = kNever;
  int64_t last_grow_ns_ = kNever;
  uint64_t last_stalled_us_ = 0;
  bool waited_before_ = false;
  uint64_t shrinks_ = 0;
  uint64_t grows_ = 0;
};

}  // namespace sluice
