#include "io/mirror_device.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace sluice {

namespace {

constexpr double kBytesPerNsUnknown = 1.0;  // 1 GB/s, until any drive has been measured

}  // namespace

MirrorDevice::MirrorDevice(std::unique_ptr<Device> inner, std::vector<std::string> drives,
                           std::vector<MirroredFile> files)
    : files_(std::move(files)), inner_(std::move(inner)) {
  SLUICE_ASSERT(!drives.empty() && drives.size() <= kDrivesMax, "{} drives", drives.size());
  for (std::string& name : drives) {
    drives_.emplace_back();
    drives_.back().stats.path = std::move(name);
  }
  for (const MirroredFile& file : files_) {
    SLUICE_ASSERT(file.copies.size() + 1 == drives_.size(), "{}: {} copies for {} drives", file.primary->path(),
                  file.copies.size(), drives_.size());
    for (const auto& copy : file.copies) {
      SLUICE_ASSERT(file.primary->align_bytes() % copy->align_bytes() == 0, "{}: reads are aligned to {}, '{}' asks {}",
                    file.primary->path(), file.primary->align_bytes(), copy->path(), copy->align_bytes());
    }
    file_of_primary_[file.primary.get()] = &file;
  }
}

double MirrorDevice::expected_ns(const Drive& drive, uint64_t bytes) const {
  double speed = drive.bytes_per_ns;
  if (speed == 0) {
    // As good as the best, until it is known better.
    for (const Drive& other : drives_) speed = std::max(speed, other.bytes_per_ns);
    if (speed == 0) speed = kBytesPerNsUnknown;
  }
  return static_cast<double>(drive.queued_bytes + bytes) / speed;
}

// The drive for a read's next attempt; empty when all have been tried.
std::optional<size_t> MirrorDevice::choose(const Flight& flight, int64_t now) const {
  std::optional<size_t> best;
  double best_ns = 0;
  for (size_t i = 0; i < drives_.size() && flight.file != nullptr; ++i) {
    const Drive& drive = drives_[i];
    if (drive.stats.dropped || (flight.tried >> i & 1) != 0) continue;
    const double ns = expected_ns(drive, flight.request.bytes);
    const auto idle_ns = static_cast<double>(now - drive.chosen_ns);
    if (drive.queued_bytes == 0 && idle_ns > std::max(static_cast<double>(kRetryNs), kRetryShare * ns)) return i;
    if (!best || ns < best_ns) {
      best = i;
      best_ns = ns;
    }
  }
  if (!best && (flight.tried & 1) == 0) return 0;
  return best;
}

// Submits to the best drive that has not failed the read yet; false when there is none.
bool MirrorDevice::start(Flight& flight) {
  while (true) {
    const int64_t now = now_ns();
    const auto chosen = choose(flight, now);
    if (!chosen) return false;
    Drive& drive = drives_[*chosen];
    flight.drive = *chosen;
    flight.tried |= 1u << *chosen;
    ReadRequest request = flight.request;
    if (*chosen > 0) {
      const File& copy = *flight.file->copies[*chosen - 1];
      if (Status status = copy.check_unchanged(); !status) {
        drop(*chosen, status.error());
        continue;
      }
      request.file = &copy;
    }
    if (drive.queued_bytes == 0) drive.busy_since_ns = now;
    drive.queued_bytes += request.bytes;
    drive.chosen_ns = now;
    inner_->submit(request);
    return true;
  }
}

void MirrorDevice::submit(const ReadRequest& request) {
  Flights::iterator entry;
  if (spare_.empty()) {
    entry = flights_.try_emplace(request.tag).first;
  } else {
    Flights::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = request.tag;
    entry = flights_.insert(std::move(node)).position;
  }
  const auto file = file_of_primary_.find(request.file);
  entry->second = Flight{.request = request,
                         .file = file == file_of_primary_.end() ? nullptr : file->second,
                         .drive = 0,
                         .tried = 0,
                         .submitted_ns = now_ns(),
                         .first_error = {}};
  const bool started = start(entry->second);
  SLUICE_ASSERT(started, "read {} has no drive", request.tag);
}

bool MirrorDevice::cancel(uint64_t tag) {
  if (!inner_->cancel(tag)) return false;
  const auto entry = flights_.find(tag);
  drives_[entry->second.drive].queued_bytes -= entry->second.request.bytes;
  spare_.push_back(flights_.extract(entry));
  return true;
}

void MirrorDevice::poll(std::vector<ReadCompletion>& completions) {
  inner_->poll(arrivals_);
  take_arrivals(false, completions);
}

void MirrorDevice::wait(std::vector<ReadCompletion>& completions) {
  const size_t count_before = completions.size();
  poll(completions);
  while (completions.size() == count_before && inner_->pending() > 0) {
    inner_->wait(arrivals_);
    take_arrivals(true, completions);
  }
}

void MirrorDevice::take_arrivals(bool exact, std::vector<ReadCompletion>& completions) {
  const int64_t now = now_ns();
  for (ReadCompletion& completion : arrivals_) {
    const auto entry = flights_.find(completion.tag);
    SLUICE_ASSERT(entry != flights_.end(), "the inner device completed read {}, which it was not given",
                  completion.tag);
    Flight& flight = entry->second;
    Drive& drive = drives_[flight.drive];
    drive.queued_bytes -= flight.request.bytes;
    ++drive.stats.reads;
    // Written to while it was read: the bytes may be the new ones.
    if (completion.status.ok() && flight.drive > 0) {
      completion.status = flight.file->copies[flight.drive - 1]->check_unchanged();
      if (!completion.status.ok()) drop(flight.drive, completion.status.error());
    }
    if (completion.status.ok()) {
      drive.failures_in_a_row = 0;
      drive.stats.bytes += flight.request.bytes_needed;
      drive.arrived_bytes += flight.request.bytes;
    } else {
      ++drive.stats.errors;
      if (++drive.failures_in_a_row == kFailuresMax) drop(flight.drive, completion.status.error());
      if (flight.first_error.ok()) flight.first_error = completion.status;
      if (start(flight)) {
        ++repeated_;
        continue;
      }
      ++failed_;
      completion.status = flight.first_error;
    }
    completion.latency_ns = now - flight.submitted_ns;
    completions.push_back(std::move(completion));
    spare_.push_back(flights_.extract(entry));
  }
  arrivals_.clear();
  for (Drive& drive : drives_) {
    if (drive.arrived_bytes > 0) learn(drive, now, exact);
  }
}

void MirrorDevice::learn(Drive& drive, int64_t now, bool exact) {
  const double sample =
      static_cast<double>(drive.arrived_bytes) / static_cast<double>(std::max<int64_t>(now - drive.busy_since_ns, 1));
  if (drive.bytes_per_ns == 0) {
    drive.bytes_per_ns = sample;
  } else if (exact || sample > drive.bytes_per_ns) {
    drive.bytes_per_ns += kSpeedBlend * (sample - drive.bytes_per_ns);
  }
  drive.busy_since_ns = now;
  drive.arrived_bytes = 0;
}

void MirrorDevice::drop(size_t index, const Error& reason) {
  Drive& drive = drives_[index];
  const auto dropped = [](const Drive& other) { return other.stats.dropped; };
  const auto remaining = static_cast<size_t>(std::count_if(drives_.begin(), drives_.end(), std::not_fn(dropped)));
  if (drive.stats.dropped || (index == 0 && remaining == 1)) return;
  drive.stats.dropped = true;
  log_warning("'{}' is no longer read from, {} of {} drives remain: {}", drive.stats.path, remaining - 1,
              drives_.size(), reason.message());
}

DeviceStats MirrorDevice::stats() const {
  DeviceStats stats = inner_->stats();
  stats.reads -= repeated_;
  stats.retries += repeated_;
  stats.errors = failed_;
  return stats;
}

std::vector<DriveStats> MirrorDevice::drive_stats() const {
  std::vector<DriveStats> all;
  for (const Drive& drive : drives_) {
    all.push_back(drive.stats);
    all.back().mb_per_s = drive.bytes_per_ns * 1e3;
  }
  return all;
}

}  // namespace sluice
