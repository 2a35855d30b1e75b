#include "pool/slot_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"

namespace sluice {

namespace {

constexpr uint64_t kHugeBytesMin = 4 * kMiB;

// Fewer page-table walks while experts are computed, and fewer pieces for the drive: a huge page is contiguous.
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] uint64_t bytes) {
#ifdef MADV_HUGEPAGE
  std::string setting;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  const bool off = std::getline(file, setting) && setting.find("[never]") != std::string::npos;
  if (!off && madvise(data, bytes, MADV_HUGEPAGE) == 0) return;
  log_line_once(LogLevel::kInfo, fmt::format("slots are in small pages: transparent huge pages are {}",
                                             off ? "off (/sys/kernel/mm/transparent_hugepage/enabled)"
                                                 : "refused (" + std::generic_category().message(errno) + ")"));
#endif
}

}  // namespace

Result<SlotMemory> SlotMemory::create(uint64_t bytes) {
  SlotMemory memory;
  if (bytes == 0) return memory;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return make_system_error(ErrorCode::kNoMemory, errno, "slot memory: wanted {}", format_bytes(bytes));
  }
  if (bytes >= kHugeBytesMin) ask_for_huge_pages(data, bytes);
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
