#include "io/memory_device.h"

#include <algorithm>

namespace sluice {

MemoryDevice::MemoryDevice(size_t reads_per_call_max) : reads_per_call_max_(reads_per_call_max) {
  SLUICE_ASSERT(reads_per_call_max > 0, "a device that never reads would make wait hang");
}

void MemoryDevice::poll(std::vector<ReadCompletion>& completions) {
  for (size_t count = 0; count < reads_per_call_max_; ++count) {
    Read* read = queue_.start_next();
    if (read == nullptr) return;
    const ReadRequest& request = read->request;
    const uint64_t file_bytes = request.file->size_bytes();
    const uint64_t bytes_there = request.offset < file_bytes ? file_bytes - request.offset : 0;
    const uint64_t wanted = std::max(request.bytes_needed, std::min(request.bytes, bytes_there));
    Status status = request.file->read_exactly(request.offset, request.destination, wanted);
    const uint64_t arrived = status.ok() ? wanted : 0;
    completions.push_back(queue_.finish(read, ReadOutcome{std::move(status), arrived, 0}));
  }
}

}  // namespace sluice
