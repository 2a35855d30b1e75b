#include "loader/prefetch_governor.h"

#include <algorithm>

namespace sluice {

namespace {

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// In how many of all pairs the first is smaller.
double share_of_wins(const std::vector<double>& first, const std::vector<double>& second) {
  double wins = 0;
  for (const double a : first) {
    for (const double b : second) wins += a < b ? 1.0 : a == b ? 0.5 : 0.0;
  }
  return wins / static_cast<double>(first.size() * second.size());
}

}  // namespace

void PrefetchGovernor::begin_trial() {
  state_ = State::kTrial;
  ++trials_;
  in_window_ = 0;
  window_ = 0;
  with_.clear();
  without_.clear();
  on_seconds_ = 0;
  on_forwards_ = 0;
}

void PrefetchGovernor::decide() {
  const bool on =
      median(with_) < median(without_) * (1 - options_.gain_min) && share_of_wins(with_, without_) >= options_.wins_min;
  switches_ += on != chosen_on_;
  chosen_on_ = on;
  state_ = on ? State::kOn : State::kOff;
  if (on) {
    rest_ = options_.rest_forwards_min;
  } else {
    rest_ = rest_ == 0 ? options_.rest_forwards_min : std::min(2 * rest_, options_.rest_forwards_max);
    const double lost_forwards = on_seconds_ / median(without_) - on_forwards_;
    constexpr double kRestMax = 1e6;
    rest_ = std::max(rest_, static_cast<uint32_t>(std::clamp(lost_forwards / options_.price_max, 0.0, kRestMax)));
  }
  in_state_ = 0;
}

void PrefetchGovernor::note_forward(double seconds) {
  ++forwards_;
  switch (state_) {
    case State::kWarmUp:
      if (++in_state_ >= options_.warm_up_forwards) begin_trial();
      break;
    case State::kOn:
    case State::kOff:
      if (++in_state_ >= rest_) begin_trial();
      break;
    case State::kTrial:
      if (enabled()) {
        on_seconds_ += seconds;
        ++on_forwards_;
      }
      // The first forward of a window still lives on what the last window did.
      if (in_window_ > 0) (window_ % 2 == 1 ? with_ : without_).push_back(seconds);
      if (++in_window_ < options_.window_forwards) break;
      in_window_ = 0;
      if (++window_ >= options_.trial_windows) {
        decide();
      } else if (window_ % 2 == 0 && median(with_) > median(without_) * (1 + options_.loss_max) &&
                 share_of_wins(with_, without_) <= options_.wins_broken_off) {
        decide();
      }
      break;
  }
}

void PrefetchGovernor::note_layer(uint32_t layer, uint64_t submitted, uint64_t taken) {
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  Layer& self = layers_[layer];
  self.submitted += submitted;
  self.taken += taken;
  if (self.submitted < options_.layer_sample) return;
  if (static_cast<double>(self.taken) < options_.taken_min * static_cast<double>(self.submitted)) {
    self.rests_until = forwards_ + options_.layer_rest_forwards;
  }
  self.submitted = 0;
  self.taken = 0;
}

}  // namespace sluice
