#include "io/paced_device.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <string_view>
#include <thread>

namespace sluice {

namespace {

bool parse_positive(std::string_view text, double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(value) && value >= 0;
}

}  // namespace

Result<PacedDrive> parse_paced_drive(const std::string& text) {
  const std::string_view view = text;
  const size_t comma = view.find(',');
  PacedDrive drive;
  double latency_us = 0;
  if (comma == std::string_view::npos || !parse_positive(view.substr(0, comma), drive.bytes_per_s) ||
      drive.bytes_per_s < 1 || !parse_positive(view.substr(comma + 1), latency_us) || latency_us > 1e9) {
    return make_error(ErrorCode::kBadArgument, "test_drive: wanted BYTES_PER_S,LATENCY_US as in 2e9,100, given '{}'",
                      text);
  }
  drive.latency_ns = static_cast<int64_t>(latency_us * 1000);
  return drive;
}

void PacedDevice::submit(const ReadRequest& request) {
  queue_.push(request);
  start_reads(now_ns());
}

bool PacedDevice::cancel(uint64_t tag) {
  return queue_.cancel(tag);
}

// Fills the places in flight, from `since_ns` on.
void PacedDevice::start_reads(int64_t since_ns) {
  while (due_.size() < drive_.depth) {
    Read* read = queue_.start_next();
    if (read == nullptr) return;
    const int64_t begin_ns = std::max({busy_until_ns_, since_ns, read->submitted_ns});
    const double move_ns = static_cast<double>(read->request.bytes) / drive_.bytes_per_s * 1e9;
    busy_until_ns_ = begin_ns + static_cast<int64_t>(move_ns);
    due_.emplace(busy_until_ns_ + drive_.latency_ns, read);
  }
}

void PacedDevice::finish(Read* read, std::vector<ReadCompletion>& completions) {
  const ReadRequest& request = read->request;
  const Status status = request.file->read_exactly(request.offset, request.destination, request.bytes_needed);
  completions.push_back(queue_.finish(read, {status, status.ok() ? request.bytes_needed : 0}));
}

void PacedDevice::poll(std::vector<ReadCompletion>& completions) {
  const int64_t now = now_ns();
  while (!due_.empty() && due_.begin()->first <= now) {
    const auto [due_ns, read] = *due_.begin();
    due_.erase(due_.begin());
    finish(read, completions);
    start_reads(due_ns);
  }
  start_reads(now);
}

void PacedDevice::wait(std::vector<ReadCompletion>& completions) {
  const size_t before = completions.size();
  poll(completions);
  while (completions.size() == before && !due_.empty()) {
    // Shorter sleeps than these end late anyway.
    constexpr int64_t kSpinNs = 60'000;
    const int64_t left_ns = due_.begin()->first - now_ns();
    if (left_ns > kSpinNs) std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns - kSpinNs));
    poll(completions);
  }
}

}  // namespace sluice
