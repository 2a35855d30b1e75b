// Many ranges of files, read in a given order at the drive's speed: a few reads are always under way while the caller
// works on the last one. For whole-file jobs (packing, verifying); experts on demand go through the loader.
//
// Lifetime the device and the files outlive the reader. The destructor waits for reads in flight.
// Device   the reader takes every completion: nobody else reads through it meanwhile.
// Owns     depth + 1 buffers of the longest request.
// Errors   next: what the device says of that range; the reader is of no use after it.
// Threads  one caller; the device has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "io/device.h"

namespace sluice {

struct ChunkRequest {
  const File* file = nullptr;
  uint64_t offset = 0;  // any
  uint64_t bytes = 0;   // > 0
};

class ChunkReader {
 public:
  static constexpr uint32_t kDepthDefault = 3;

  // Nothing is read yet.
  static Result<std::unique_ptr<ChunkReader>> create(Device& device, std::vector<ChunkRequest> requests,
                                                     uint32_t depth = kDepthDefault);
  ~ChunkReader();
  ChunkReader(const ChunkReader&) = delete;
  ChunkReader& operator=(const ChunkReader&) = delete;

  // The bytes of the next request, valid until the next call. There must be one left.
  Result<std::span<const std::byte>> next();

 private:
  struct FreeBytes {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  struct Buffer {
    std::unique_ptr<std::byte, FreeBytes> bytes;
    bool done = false;
    Status status;
  };

  ChunkReader(Device& device, std::vector<ChunkRequest> requests) : device_(device), requests_(std::move(requests)) {}
  void submit_next();
  void collect(bool block);

  Device& device_;
  std::vector<ChunkRequest> requests_;
  std::vector<Buffer> buffers_;  // request r is read into buffer r % size
  size_t submitted_ = 0;
  size_t taken_ = 0;
  size_t in_flight_ = 0;
  std::vector<ReadCompletion> completions_;
};

}  // namespace sluice
