// How a job that takes more than a moment tells where it is, and is told to stop. Drawing is cli's affair.
#pragma once

#include <cstdint>
#include <functional>

namespace sluice {

// `phase` is a word for the user: "packing". False: stop, with kCancelled.
using WorkProgress = std::function<bool(const char* phase, uint64_t done_bytes, uint64_t total_bytes)>;

}  // namespace sluice
