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
// Cost     a few dozen small files (0.1 ms); for start-up and for occasional checks, not per token. MemoryWatch::sample:
//          three files for each cgroup and two more (0.05 ms with two cgroups).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// The same while a model runs, and how hard it is to get memory at all. Finds the files once, so that a sample costs a
// few small reads; a process that is moved to another cgroup meanwhile is not followed.
struct MemorySample {
  uint64_t available_bytes = 0;  // as SystemMemory's
  // Time that some task spent waiting for memory since its cgroup (v2, where it tells) or the machine started, in
  // microseconds (PSI, "some"); 0 where the kernel does not count it.
  uint64_t stalled_us = 0;
  bool stalls_are_own = false;  // of our own cgroup, not of the whole machine
};

class MemoryWatch {
 public:
  explicit MemoryWatch(const std::string& root = "");

  // kUnsupported as read_system_memory.
  Result<MemorySample> sample() const;

 private:
  struct Limit {  // one cgroup that may bind
    bool v1 = false;
    std::string folder;
  };
  std::string root_;
  std::vector<Limit> limits_;
  std::string pressure_path_;  // empty: none
  bool pressure_is_own_ = false;
};

// Cores that the affinity mask and the whole cores of every cgroup's cpu quota allow; at least 1.
unsigned usable_cpu_count(const std::string& root = "");

// The most memory that this process ever had resident.
uint64_t peak_rss_bytes(const std::string& root = "");

}  // namespace sluice
