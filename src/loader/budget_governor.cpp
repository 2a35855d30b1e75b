#include "loader/budget_governor.h"

#include <algorithm>

#include "base/bytes.h"

namespace sluice {

namespace {

constexpr int64_t kQuietNs = 5'000'000'000;         // after shrinking
constexpr int64_t kGrowIntervalNs = 1'000'000'000;  // between two steps
constexpr uint64_t kShrinkDivisor = 16;
constexpr uint64_t kGrowDivisor = 32;
constexpr uint64_t kSmallestDivisor = 256;  // a step that is not worth taking
constexpr int64_t kWaitDivisor = 10;        // tasks that wait for this part of the time are a warning

}  // namespace

uint64_t governor_reserve_bytes(uint64_t available_bytes) {
  return std::clamp<uint64_t>(available_bytes / 32, 8 * kMiB, 256 * kMiB);
}

// Whether tasks waited for memory between the last two looks, and between the two before.
bool BudgetGovernor::tasks_wait(const GovernorInput& input) {
  const bool first = last_look_ns_ == kNever;
  const int64_t stalled_ns =
      static_cast<int64_t>(input.stalled_us - std::min(input.stalled_us, last_stalled_us_)) * 1000;
  const bool waits = !first && stalled_ns > (input.now_ns - last_look_ns_) / kWaitDivisor;
  const bool twice = waits && waited_before_;
  waited_before_ = waits;
  last_stalled_us_ = input.stalled_us;
  return twice && (input.stalls_are_own || input.available_bytes < 4 * options_.reserve_bytes);
}

void BudgetGovernor::shrink_to(uint64_t bytes, int64_t now_ns) {
  last_shrink_ns_ = now_ns;
  bytes = std::max(bytes, options_.pool_bytes_min);
  if (bytes >= pool_bytes_) return;
  pool_bytes_ = bytes;
  ++shrinks_;
}

uint64_t BudgetGovernor::update(const GovernorInput& input) {
  const bool waits = tasks_wait(input);
  last_look_ns_ = input.now_ns;
  const uint64_t reserve = options_.reserve_bytes;
  if (input.available_bytes < reserve) {
    const uint64_t missing = reserve + reserve / 2 - input.available_bytes;
    shrink_to(pool_bytes_ - std::min(pool_bytes_, missing), input.now_ns);
    return pool_bytes_;
  }
  if (waits) {
    const uint64_t step = options_.pool_bytes_max / kShrinkDivisor;
    shrink_to(std::max(pool_bytes_ - std::min(pool_bytes_, step), options_.pool_bytes_max / 2), input.now_ns);
    return pool_bytes_;
  }
  const bool quiet = last_shrink_ns_ == kNever || input.now_ns - last_shrink_ns_ >= kQuietNs;
  const bool waited = last_grow_ns_ == kNever || input.now_ns - last_grow_ns_ >= kGrowIntervalNs;
  if (input.available_bytes > 2 * reserve && pool_bytes_ < options_.pool_bytes_max && quiet && waited) {
    const uint64_t step = std::min((input.available_bytes - 2 * reserve) / 2, options_.pool_bytes_max / kGrowDivisor);
    const uint64_t bytes = std::min(pool_bytes_ + step, options_.pool_bytes_max);
    if (bytes < options_.pool_bytes_max && step < options_.pool_bytes_max / kSmallestDivisor) return pool_bytes_;
    pool_bytes_ = bytes;
    last_grow_ns_ = input.now_ns;
    ++grows_;
  }
  return pool_bytes_;
}

}  // namespace sluice
