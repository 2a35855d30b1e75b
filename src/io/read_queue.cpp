#include "io/read_queue.h"

#include <utility>

#include "base/bytes.h"
#include "base/clock.h"

namespace sluice {

void ReadQueue::List::push_back(Read* read) {
  read->previous_ = last;
  read->next_ = nullptr;
  (last != nullptr ? last->next_ : first) = read;
  last = read;
  ++count;
}

void ReadQueue::List::remove(Read* read) {
  (read->previous_ != nullptr ? read->previous_->next_ : first) = read->next_;
  (read->next_ != nullptr ? read->next_->previous_ : last) = read->previous_;
  read->previous_ = nullptr;
  read->next_ = nullptr;
  --count;
}

void ReadQueue::push(const ReadRequest& request) {
  SLUICE_ASSERT(request.file != nullptr && request.destination != nullptr, "read {} without a file or a destination",
                request.tag);
  SLUICE_ASSERT(request.bytes > 0 && request.bytes_needed > 0 && request.bytes_needed <= request.bytes,
                "read {} of {} bytes that needs {}", request.tag, request.bytes, request.bytes_needed);
  const uint64_t align_bytes = request.file->align_bytes();
  const auto address = reinterpret_cast<uintptr_t>(request.destination);
  SLUICE_ASSERT(
      align_down(request.offset | request.bytes | address, align_bytes) == (request.offset | request.bytes | address),
      "read {} is not aligned to {}: offset {}, bytes {}, address {:#x}", request.tag, align_bytes, request.offset,
      request.bytes, address);

  Read* read = nullptr;
  if (spare_.empty()) {
    const auto [entry, inserted] = reads_.try_emplace(request.tag);
    SLUICE_ASSERT(inserted, "read {} is submitted a second time", request.tag);
    read = &entry->second;
  } else {
    Table::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = request.tag;
    const auto inserted = reads_.insert(std::move(node));
    SLUICE_ASSERT(inserted.inserted, "read {} is submitted a second time", request.tag);
    read = &inserted.position->second;
  }
  read->request = request;
  read->progress = ReadProgress(request.bytes, request.bytes_needed, align_bytes);
  read->submitted_ns = now_ns();
  read->state_ = Read::State::kQueued;
  list_of(request.priority).push_back(read);
}

Read* ReadQueue::find_queued(uint64_t tag) {
  const auto entry = reads_.find(tag);
  if (entry == reads_.end() || entry->second.state_ != Read::State::kQueued) return nullptr;
  return &entry->second;
}

bool ReadQueue::cancel(uint64_t tag) {
  Read* read = find_queued(tag);
  if (read == nullptr) return false;
  list_of(read->request.priority).remove(read);
  forget(tag);
  ++stats_.cancelled;
  return true;
}

void ReadQueue::raise(uint64_t tag) {
  Read* read = find_queued(tag);
  if (read == nullptr || read->request.priority == ReadPriority::kDemand) return;
  prefetch_.remove(read);
  read->request.priority = ReadPriority::kDemand;
  demand_.push_back(read);
}

Read* ReadQueue::start_next() {
  List& list = demand_.count > 0 ? demand_ : prefetch_;
  Read* read = list.first;
  if (read == nullptr) return nullptr;
  list.remove(read);
  if (in_flight_.count == 0) busy_since_ns_ = now_ns();
  in_flight_.push_back(read);
  read->state_ = Read::State::kInFlight;
  return read;
}

ReadCompletion ReadQueue::finish(Read* read, const ReadOutcome& outcome) {
  SLUICE_ASSERT(read->state_ == Read::State::kInFlight, "read {} finishes without having started", read->request.tag);
  const int64_t now = now_ns();
  in_flight_.remove(read);
  if (in_flight_.count == 0) stats_.busy_ns += now - busy_since_ns_;
  ++stats_.reads;
  stats_.bytes += outcome.bytes;
  stats_.retries += outcome.retries;
  if (!outcome.status.ok()) ++stats_.errors;
  ReadCompletion completion{read->request.tag, outcome.status, now - read->submitted_ns};
  forget(completion.tag);
  return completion;
}

void ReadQueue::forget(uint64_t tag) {
  spare_.push_back(reads_.extract(tag));
}

DeviceStats ReadQueue::stats() const {
  DeviceStats stats = stats_;
  if (in_flight_.count > 0) stats.busy_ns += now_ns() - busy_since_ns_;
  return stats;
}

}  // namespace sluice
