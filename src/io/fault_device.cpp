#include "io/fault_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sluice {

namespace {

constexpr int kGarbageByte = 0xDB;

}  // namespace

FaultDevice::FaultDevice(std::unique_ptr<Device> inner, const FaultOptions& options)
    : options_(options), fates_(options.seed), orders_(options.seed + 1), inner_(std::move(inner)) {
  SLUICE_ASSERT(options.delay_calls_max > 0, "a delay takes at least one call");
}

// Draws in any case, so that one probability does not shift the fates that another one gives.
bool FaultDevice::chance(double probability) {
  const double draw = static_cast<double>(fates_() >> 11) * 0x1p-53;
  return draw < probability;
}

void FaultDevice::submit(const ReadRequest& request) {
  Fate fate{.request = request};
  if (const bool late = chance(options_.delay); late) fate.delay_calls = 1;
  const bool cut_short = chance(options_.cut_short);
  const bool fail = chance(options_.fail);
  const bool corrupt = chance(options_.corrupt);
  fate.damage = cut_short ? Damage::kCutShort : fail ? Damage::kFail : corrupt ? Damage::kCorrupt : Damage::kNone;
  const uint64_t extra_calls = fates_() % options_.delay_calls_max;
  if (fate.delay_calls > 0) fate.delay_calls += extra_calls;
  fate.place = fates_() % std::max<uint64_t>(request.bytes_needed, 1);
  // First the inner device: it is the one that checks the request.
  inner_->submit(request);
  fate_of_tag_.insert_or_assign(request.tag, fate);
}

bool FaultDevice::cancel(uint64_t tag) {
  if (!inner_->cancel(tag)) return false;
  fate_of_tag_.erase(tag);
  return true;
}

void FaultDevice::raise(uint64_t tag) {
  inner_->raise(tag);
}

void FaultDevice::poll(std::vector<ReadCompletion>& completions) {
  ++call_;
  inner_->poll(arrivals_);
  take_arrivals();
  deliver(completions);
}

void FaultDevice::wait(std::vector<ReadCompletion>& completions) {
  const size_t count_before = completions.size();
  while (completions.size() == count_before && pending() > 0) {
    ++call_;
    // With completions in hand each round brings them one call nearer; only without may this block.
    if (held_.empty()) {
      inner_->wait(arrivals_);
    } else {
      inner_->poll(arrivals_);
    }
    take_arrivals();
    deliver(completions);
  }
}

void FaultDevice::take_arrivals() {
  for (ReadCompletion& completion : arrivals_) {
    const auto entry = fate_of_tag_.find(completion.tag);
    SLUICE_ASSERT(entry != fate_of_tag_.end(), "the inner device completed read {}, which it was not given",
                  completion.tag);
    const Fate fate = entry->second;
    fate_of_tag_.erase(entry);
    if (completion.status.ok()) inflict(fate, completion);
    if (fate.delay_calls > 0) ++counts_.delayed;
    held_.push_back(Held{std::move(completion), call_ + fate.delay_calls});
  }
  arrivals_.clear();
}

void FaultDevice::inflict(const Fate& fate, ReadCompletion& completion) {
  const ReadRequest& request = fate.request;
  const std::string& path = request.file->path();
  switch (fate.damage) {
    case Damage::kNone: return;
    case Damage::kCutShort:
      ++counts_.cut_short;
      std::memset(request.destination + fate.place, kGarbageByte, request.bytes - fate.place);
      completion.status = make_error(ErrorCode::kShortRead, "'{}' ends early: wanted {} bytes at offset {}, got {}",
                                     path, request.bytes_needed, request.offset, fate.place);
      return;
    case Damage::kFail:
      ++counts_.failed;
      std::memset(request.destination, kGarbageByte, request.bytes);
      completion.status = make_system_error(ErrorCode::kDeviceError, EIO, "cannot read {} bytes at offset {} of '{}'",
                                            request.bytes_needed, request.offset, path);
      return;
    case Damage::kCorrupt:
      ++counts_.corrupted;
      request.destination[fate.place] ^= std::byte{0x40};
      return;
  }
}

void FaultDevice::deliver(std::vector<ReadCompletion>& completions) {
  const auto first_due =
      std::stable_partition(held_.begin(), held_.end(), [this](const Held& held) { return held.due_call > call_; });
  const auto due_count = held_.end() - first_due;
  if (due_count > 1 && static_cast<double>(orders_() >> 11) * 0x1p-53 < options_.reorder) {
    // At least one place on, so that the order is another one whatever the rest of the shuffle does.
    std::shuffle(first_due + 1, held_.end(), orders_);
    std::rotate(first_due, first_due + 1, held_.end());
    ++counts_.reordered;
  }
  for (auto held = first_due; held != held_.end(); ++held) completions.push_back(std::move(held->completion));
  held_.erase(first_due, held_.end());
}

DeviceStats FaultDevice::stats() const {
  DeviceStats stats = inner_->stats();
  stats.errors += counts_.cut_short + counts_.failed;
  return stats;
}

std::string FaultDevice::name() const {
  return fmt::format("fault({})", inner_->name());
}

}  // namespace sluice
