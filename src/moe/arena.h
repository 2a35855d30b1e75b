// Scratch memory of one computation: take what is needed, give all of it back at once. Grows while a model finds its
// working size, then allocates nothing. Contents are undefined.
//
// Owns     its blocks; pointers are valid until reset.
// Threads  thread-compatible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "base/bytes.h"

namespace sluice {

class Arena {
 public:
  static constexpr uint64_t kAlignBytes = 64;

  void* take(uint64_t bytes) {
    bytes = align_up(std::max<uint64_t>(bytes, 1), kAlignBytes);
    if (blocks_.empty() || used_ + bytes > blocks_.back().bytes) {
      add_block(std::max(bytes, blocks_.empty() ? kBlockBytesMin : 2 * blocks_.back().bytes));
    }
    void* result = blocks_.back().data.get() + used_;
    used_ += bytes;
    return result;
  }

  template <typename T>
  T* take_array(uint64_t count) {
    return static_cast<T*>(take(count * sizeof(T)));
  }

  void reset() {
    if (blocks_.size() > 1) {  // one block of the size that turned out to be needed
      uint64_t total = 0;
      for (const Block& block : blocks_) total += block.bytes;
      blocks_.clear();
      add_block(total);
    }
    used_ = 0;
  }

  uint64_t bytes() const {
    uint64_t total = 0;
    for (const Block& block : blocks_) total += block.bytes;
    return total;
  }

 private:
  static constexpr uint64_t kBlockBytesMin = 64 * kKiB;

  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t{kAlignBytes}); }
  };
  struct Block {
    std::unique_ptr<std::byte, Free> data;
    uint64_t bytes = 0;
  };

  void add_block(uint64_t bytes) {
    blocks_.push_back({std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignBytes}))), bytes});
    used_ = 0;
  }

  std::vector<Block> blocks_;
  uint64_t used_ = 0;
};

}  // namespace sluice
