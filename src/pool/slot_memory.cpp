#include "pool/slot_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/bytes.h"

namespace sluice {

Result<SlotMemory> SlotMemory::create(uint64_t bytes) {
  SlotMemory memory;
  if (bytes == 0) return memory;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return make_system_error(ErrorCode::kNoMemory, errno, "slot memory: wanted {}", format_bytes(bytes));
  }
#ifdef MADV_HUGEPAGE
  // Fewer page-table walks while experts are read; a kernel without transparent huge pages just says no.
  if (bytes >= 4 * kMiB) (void)madvise(data, bytes, MADV_HUGEPAGE);
#endif
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return memory;
}

SlotMemory::SlotMemory(SlotMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SlotMemory& SlotMemory::operator=(SlotMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SlotMemory::~SlotMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace sluice
