// One block of page-aligned memory for slots or staging, taken once and given back at destruction: anonymous, so the
// kernel cannot reclaim it to a file; in huge pages where the system offers them transparently, else in small ones with one line that says so.
//
// Errors   kNoMemory with the bytes that were wanted.
// Threads  const after create.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"

namespace sluice {

class SlotMemory {
 public:
  static Result<SlotMemory> create(uint64_t bytes);

  SlotMemory() = default;
  SlotMemory(SlotMemory&& other) noexcept;
  SlotMemory& operator=(SlotMemory&& other) noexcept;
  ~SlotMemory();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace sluice
