// A line on standard error that tells how far a job is, how fast it goes and how long it will take; redrawn in place.
// Nothing is drawn where standard error is no terminal, or for a job of less than a second.
//
// Threads  one.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Draws at most some ten times a second. Another phase starts its own clock.
  void show(const char* phase, uint64_t done_bytes, uint64_t total_bytes);
  // Removes the line, so that what is printed next stands alone.
  void clear();

 private:
  bool enabled_ = false;
  bool drawn_ = false;
  std::string phase_;
  int64_t begin_ns_ = 0;
  int64_t drawn_ns_ = 0;
};

// "packing [##########----------]  52 %  4.10 GiB of 7.90 GiB  812 MiB/s  5 s left"; without a speed before there is
// one.
std::string progress_line(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes, double seconds);

}  // namespace sluice
