#include "cli/progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/bytes.h"
#include "base/clock.h"

namespace sluice {

namespace {

constexpr int64_t kSilentNs = 1'000'000'000;
constexpr int64_t kRedrawNs = 100'000'000;
constexpr int kBarCells = 20;
constexpr double kSecondsMax = 1e9;  // nobody waits so long

std::string time_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(std::min(seconds, kSecondsMax)));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

}  // namespace

std::string progress_line(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes, double seconds) {
  const double share =
      total_bytes == 0 ? 1 : std::min(1.0, static_cast<double>(done_bytes) / static_cast<double>(total_bytes));
  const int filled = static_cast<int>(share * kBarCells);
  const double rate = seconds > 0 ? static_cast<double>(done_bytes) / seconds : 0;
  std::string line = fmt::format("{} [{:#>{}}{:->{}}] {:3.0f} %  {} of {}", phase, "", filled, "", kBarCells - filled,
                                 std::floor(100 * share), format_bytes(done_bytes), format_bytes(total_bytes));
  if (rate > 0) {
    line += fmt::format("  {}/s  {} left", format_bytes(static_cast<uint64_t>(rate)),
                        time_text(static_cast<double>(total_bytes - std::min(done_bytes, total_bytes)) / rate));
  }
  return line;
}

ProgressBar::ProgressBar() : enabled_(isatty(STDERR_FILENO) == 1) {}

void ProgressBar::show(const char* phase, uint64_t done_bytes, uint64_t total_bytes) {
  if (!enabled_) return;
  const int64_t now = now_ns();
  if (phase_ != phase) {
    phase_ = phase;
    begin_ns_ = now;
  }
  if (now - begin_ns_ < kSilentNs || now - drawn_ns_ < kRedrawNs) return;
  drawn_ns_ = now;
  drawn_ = true;
  // \x1b[K clears what a longer line left behind.
  fmt::print(stderr, "\r{}\x1b[K", progress_line(phase_, done_bytes, total_bytes, seconds_of(now - begin_ns_)));
  std::fflush(stderr);
}

void ProgressBar::clear() {
  if (drawn_) fmt::print(stderr, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace sluice
