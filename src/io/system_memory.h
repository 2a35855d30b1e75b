// What this machine and its container really leave us: memory that can still be taken, and cores that may be used.
// Only measures; what to do with it is decided elsewhere. All values are of the moment of the call.
//
// A container's limit is that of its own cgroup and of every cgroup above it, in cgroup v1, v2 or both. Page cache
// that the kernel would give up counts as available: a reader of a big file fills its cgroup with it, and is not full.
//
// Root     every function reads ROOT/proc and ROOT/sys, so that a test can stand a tree of files in their place.
// Units    bytes.
// Errors   malformed values are ignored, with a debug line.
// Threads  safe from any thread.
// Cost     a few dozen small files; for start-up and for occasional checks, not per token.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace sluice {

struct SystemMemory {
  uint64_t host_available_bytes = 0;  // MemAvailable of /proc/meminfo
  uint64_t limit_bytes = UINT64_MAX;  // the tightest limit of our cgroup and its ancestors; UINT64_MAX: none
  uint64_t available_bytes = 0;       // the least of host_available_bytes and what each cgroup's limit leaves
  std::string bound_by;               // what that is, for a table: "host" or "cgroup v2 /user.slice"
};

// kUnsupported when /proc/meminfo has no MemAvailable.
Result<SystemMemory> read_system_memory(const std::string& root = "");

// Cores that the affinity mask and the whole cores of every cgroup's cpu quota allow; at least 1.
unsigned usable_cpu_count(const std::string& root = "");

// The most memory that this process ever had resident.
uint64_t peak_rss_bytes(const std::string& root = "");

}  // namespace sluice
