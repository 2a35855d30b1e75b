// How far a tool's writing has come: one line on a terminal, rewritten a few times a second; nothing elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"

namespace sluice::tools {

class ProgressLine {
 public:
  ProgressLine(std::string tool, uint64_t bytes_total);
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  // Clears the line.
  ~ProgressLine();

  void update(uint64_t bytes_written);

 private:
  const std::string tool_;
  const uint64_t bytes_total_;
  const bool is_shown_;
  const int64_t start_ns_ = now_ns();
  int64_t last_ns_ = 0;
};

}  // namespace sluice::tools
