// One block of page-aligned anonymous memory for slots or staging, taken once and given back at destruction. Parts of
// it can be lent to the system meanwhile and taken again, at the same addresses.
//
// Wishes   huge   transparent huge pages: fewer page-table walks while experts are read
//          lock   pages that the kernel may not reclaim (mlock)
//          touch  all pages present from the start, so that what others see as available is what really is left: two
//                 programs that size themselves by it then both fit. Locking does it too.
//          A wish that cannot be had is told in missing(), one line for each; where it was demanded it is an error.
// Lending  give_back makes whole pages vanish: their contents are lost and their memory is the system's at once (inside
//          a huge page: when the kernel has split it). take_again locks and touches a range as at the start.
// Units    bytes; ranges of give_back and take_again are multiples of page_bytes().
// Errors   kNoMemory with the bytes that were wanted; kUnsupported for a demanded wish.
// Threads  thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace sluice {

enum class Wish { kNo, kTry, kDemand };

struct MemoryOptions {
  Wish huge = Wish::kTry;
  Wish lock = Wish::kNo;
  bool touch = false;
};

class SlotMemory {
 public:
  static Result<SlotMemory> create(uint64_t bytes, const MemoryOptions& options = {});

  SlotMemory() = default;
  SlotMemory(SlotMemory&& other) noexcept;
  SlotMemory& operator=(SlotMemory&& other) noexcept;
  ~SlotMemory();

  static uint64_t page_bytes();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  bool huge() const { return huge_; }
  bool locked() const { return locked_; }
  const std::vector<std::string>& missing() const { return missing_; }

  void give_back(uint64_t offset, uint64_t bytes);
  void take_again(uint64_t offset, uint64_t bytes);

 private:
  std::byte* mapping_ = nullptr;
  uint64_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;  // inside the mapping, at a huge page's alignment where that was wished
  uint64_t bytes_ = 0;
  bool huge_ = false;
  bool locked_ = false;
  bool touch_ = false;
  std::vector<std::string> missing_;
};

}  // namespace sluice
