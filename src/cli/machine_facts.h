// What a measurement must tell about the machine it was made on, and what makes two measurements alike: the processor,
// its energy where it counts that, how much of a file the page cache holds. Measures; judges nothing.
//
// Root     as in io/system_memory.h: ROOT/proc and ROOT/sys, for tests.
// Errors   what a machine does not tell is empty; nothing here ends a program.
// Threads  thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/file.h"

namespace sluice {

// "AMD EPYC"; "unknown" when the machine does not say.
std::string processor_name(const std::string& root = "");

// Energy of the processor packages (RAPL), as the kernel tells it under sys/class/powercap. Usually only root may read
// it, and virtual machines have none.
class EnergyMeter {
 public:
  explicit EnergyMeter(const std::string& root = "");

  bool available() const { return !packages_.empty(); }
  // Joules of all packages since construction or the last call; empty when not available. The counters wrap around
  // after minutes to hours: a call must come before that.
  std::optional<double> joules_since_last();

 private:
  struct Package {
    std::string counter_path;
    uint64_t wrap_uj = 0;
    uint64_t last_uj = 0;
  };
  std::vector<Package> packages_;
};

// The share of a file's pages that the page cache holds, 0 to 1. kUnsupported when the system does not say.
Result<double> cached_share(const File& file);

// Asks the system to give up its cache of the file, writing what is not on disk yet first. What it kept is told by
// cached_share: other users of the file may hold pages.
void drop_cache(const File& file);

// Makes peak_rss_bytes (io/system_memory.h) count from now on. False when the system does not let us.
bool reset_peak_rss();

}  // namespace sluice
