// Monotonic time in nanoseconds. Durations and instants are int64_t with the unit in their names.
#pragma once

#include <chrono>
#include <cstdint>

namespace sluice {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double seconds_of(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

}  // namespace sluice
