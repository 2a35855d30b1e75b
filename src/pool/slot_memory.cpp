#include "pool/slot_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/bytes.h"

namespace sluice {

namespace {

constexpr uint64_t kHugePageBytes = 2 * kMiB;
// Below this, aligning to a huge page wastes more than it gains.
constexpr uint64_t kHugeBytesMin = 4 * kMiB;

// Why the system has no transparent huge pages for us; empty when it has.
std::string huge_pages_refused(void* data, uint64_t bytes) {
#ifdef MADV_HUGEPAGE
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(setting, text);
  if (text.find("[never]") != std::string::npos) return "off (/sys/kernel/mm/transparent_hugepage/enabled)";
  if (madvise(data, bytes, MADV_HUGEPAGE) == 0) return "";
  return "refused (" + std::generic_category().message(errno) + ")";
#else
  (void)data, (void)bytes;
  return "not on this system";
#endif
}

// Why the range could not be locked; empty when it is, and then every page of it is present.
std::string lock_refused(void* data, uint64_t bytes) {
  if (mlock(data, bytes) == 0) return "";
  std::string reason = make_system_error(ErrorCode::kUnsupported, errno, "mlock").message();
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    reason += fmt::format(", the limit is {} (ulimit -l)", format_bytes(limit.rlim_cur));
  }
  return reason;
}

void touch_pages(std::byte* data, uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
  // A write of what is there: the pages may hold an expert already.
  for (uint64_t offset = 0; offset < bytes; offset += SlotMemory::page_bytes()) {
    volatile std::byte* at = data + offset;
    *at = *at;
  }
}

}  // namespace

uint64_t SlotMemory::page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Result<SlotMemory> SlotMemory::create(uint64_t bytes, const MemoryOptions& options) {
  SlotMemory memory;
  if (bytes == 0) return memory;
  const bool huge = options.huge != Wish::kNo && bytes >= kHugeBytesMin;
  const auto mapping_bytes = huge ? checked_add(bytes, kHugePageBytes) : std::optional(bytes);
  void* mapping = !mapping_bytes
                      ? MAP_FAILED
                      : mmap(nullptr, *mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    return make_system_error(ErrorCode::kNoMemory, mapping_bytes ? errno : ENOMEM, "slot memory: wanted {}",
                             format_bytes(bytes));
  }
  memory.mapping_ = static_cast<std::byte*>(mapping);
  memory.mapping_bytes_ = *mapping_bytes;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  memory.data_ = memory.mapping_ + (huge ? align_up(address, kHugePageBytes) - address : 0);
  memory.bytes_ = bytes;
  memory.touch_ = options.touch;

  if (huge) {
    const std::string reason = huge_pages_refused(memory.data_, bytes);
    memory.huge_ = reason.empty();
    if (!memory.huge_) {
      memory.missing_.push_back(fmt::format("slots are in small pages: transparent huge pages are {}", reason));
      if (options.huge == Wish::kDemand) return make_error(ErrorCode::kUnsupported, "{}", memory.missing_.back());
    }
  }
  if (options.lock != Wish::kNo) {
    const std::string reason = lock_refused(memory.data_, bytes);
    memory.locked_ = reason.empty();
    if (!memory.locked_) {
      memory.missing_.push_back(fmt::format("{} of slot memory may be reclaimed: {}", format_bytes(bytes), reason));
      if (options.lock == Wish::kDemand) return make_error(ErrorCode::kUnsupported, "{}", memory.missing_.back());
    }
  }
  if (options.touch && !memory.locked_) touch_pages(memory.data_, bytes);
  return memory;
}

SlotMemory::SlotMemory(SlotMemory&& other) noexcept {
  *this = std::move(other);
}

SlotMemory& SlotMemory::operator=(SlotMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(huge_, other.huge_);
  std::swap(locked_, other.locked_);
  std::swap(touch_, other.touch_);
  std::swap(missing_, other.missing_);
  return *this;
}

SlotMemory::~SlotMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void SlotMemory::give_back(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  SLUICE_ASSERT(offset % page_bytes() == 0 && offset + bytes <= align_up(bytes_, page_bytes()), "{} + {} of {}", offset,
                bytes, bytes_);
#ifdef MADV_DONTNEED_LOCKED
  if (locked_ && madvise(data_ + offset, bytes, MADV_DONTNEED_LOCKED) == 0) return;
#endif
  // Other kernels keep locked pages whatever is advised.
  if (locked_) (void)munlock(data_ + offset, bytes);
  (void)madvise(data_ + offset, bytes, MADV_DONTNEED);
}

void SlotMemory::take_again(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  SLUICE_ASSERT(offset % page_bytes() == 0 && offset + bytes <= align_up(bytes_, page_bytes()), "{} + {} of {}", offset,
                bytes, bytes_);
  if (locked_) (void)mlock(data_ + offset, bytes);
  if (touch_) touch_pages(data_ + offset, bytes);
}

}  // namespace sluice
