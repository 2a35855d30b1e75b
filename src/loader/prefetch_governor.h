// Whether prefetching pays on this machine, now: decided by comparing forwards with it and without it, in short
// alternating windows, and layer by layer by what became of the reads. Pure: told of times, tells a decision.
//
// Course   warm-up (off) -> trial -> on or off for a while -> trial -> ...
//          A trial is windows of a few forwards, off and on in turn. On needs a gain of gain_min between the medians,
//          and to be the faster one in wins_min of all pairs, so that noise does not choose; else off is chosen:
//          prefetching has to earn its place. A trial that goes badly is broken off.
// Price    a losing trial costs its on-windows. After a loss the wait before the next trial doubles, from
//          rest_forwards_min to rest_forwards_max, and is at least so long that what the trial lost stays below
//          price_max of the time. While on, a trial costs the off-windows' gain, and comes every rest_forwards_min.
// Layers   a layer of whose prefetches fewer than taken_min were demanded is left out, and tried again later.
// Units    seconds, forwards of one token or a few.
// Threads  thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

struct PrefetchGovernorOptions {
  uint32_t warm_up_forwards = 64;  // the pool finds its experts; a short answer is never tried on
  uint32_t window_forwards = 6;
  uint32_t trial_windows = 12;  // off and on in turn; even
  uint32_t rest_forwards_min = 256;
  uint32_t rest_forwards_max = 8192;
  double gain_min = 0.01;
  double wins_min = 0.62;
  double loss_max = 0.1;  // a trial is broken off when on loses more, and is the faster one in so few pairs:
  double wins_broken_off = 0.3;
  double price_max = 0.005;
  double taken_min = 0.3;
  uint32_t layer_sample = 64;           // prefetches of a layer that are judged together
  uint32_t layer_rest_forwards = 1024;  // a layer left out is tried again after so many
};

class PrefetchGovernor {
 public:
  explicit PrefetchGovernor(const PrefetchGovernorOptions& options) : options_(options) {}

  // Whether the next forward prefetches.
  bool enabled() const { return state_ == State::kOn || (state_ == State::kTrial && window_ % 2 == 1); }
  bool enabled(uint32_t layer) const {
    return enabled() && (layer >= layers_.size() || layers_[layer].rests_until <= forwards_);
  }

  // A forward ended that was run as enabled() said.
  void note_forward(double seconds);
  // Of a layer: prefetches begun, and how many were demanded in time or not, since the last call.
  void note_layer(uint32_t layer, uint64_t submitted, uint64_t taken);

  uint64_t trials() const { return trials_; }
  uint64_t switches() const { return switches_; }

 private:
  enum class State : uint8_t { kWarmUp, kTrial, kOn, kOff };
  struct Layer {
    uint64_t submitted = 0;
    uint64_t taken = 0;
    uint64_t rests_until = 0;
  };

  void begin_trial();
  void decide();

  PrefetchGovernorOptions options_;
  State state_ = State::kWarmUp;
  bool chosen_on_ = false;
  uint64_t forwards_ = 0;
  uint32_t in_state_ = 0;  // forwards
  uint32_t in_window_ = 0;
  uint32_t window_ = 0;  // even: off
  uint32_t rest_ = 0;    // 0: no loss yet
  std::vector<double> with_;
  std::vector<double> without_;
  double on_seconds_ = 0;  // of the trial's forwards with prefetching, all of them
  uint32_t on_forwards_ = 0;
  std::vector<Layer> layers_;
  uint64_t trials_ = 0;
  uint64_t switches_ = 0;
};

}  // namespace sluice
