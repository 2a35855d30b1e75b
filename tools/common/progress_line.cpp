#include "common/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/bytes.h"

namespace sluice::tools {

ProgressLine::ProgressLine(std::string tool, uint64_t bytes_total)
    : tool_(std::move(tool)), bytes_total_(bytes_total), is_shown_(isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (is_shown_) fmt::print(stderr, "\r\x1b[K");
}

void ProgressLine::update(uint64_t bytes_written) {
  constexpr int64_t kIntervalNs = 200'000'000;
  const int64_t now = now_ns();
  if (!is_shown_ || now - last_ns_ < kIntervalNs) return;
  last_ns_ = now;
  const double rate = static_cast<double>(bytes_written) / std::max(seconds_of(now - start_ns_), 1e-3);
  fmt::print(stderr, "\r{}: {} of {}, {}/s\x1b[K", tool_, format_bytes(bytes_written), format_bytes(bytes_total_),
             format_bytes(static_cast<uint64_t>(rate)));
  std::fflush(stderr);
}

}  // namespace sluice::tools
