#include "io/chunk_reader.h"

#include <algorithm>

#include "base/bytes.h"

namespace sluice {

namespace {

// Buffers start on a page: enough for any file's alignment that statx reports today.
constexpr uint64_t kBufferAlignBytes = 4096;

uint64_t aligned_begin(const ChunkRequest& request) {
  return align_down(request.offset, request.file->align_bytes());
}
uint64_t aligned_bytes(const ChunkRequest& request) {
  return align_up(request.offset + request.bytes, request.file->align_bytes()) - aligned_begin(request);
}

}  // namespace

Result<std::unique_ptr<ChunkReader>> ChunkReader::create(Device& device, std::vector<ChunkRequest> requests,
                                                         uint32_t depth) {
  uint64_t bytes_max = 0;
  uint64_t align = kBufferAlignBytes;
  for (const ChunkRequest& request : requests) {
    bytes_max = std::max(bytes_max, aligned_bytes(request));
    align = std::max(align, request.file->align_bytes());
  }
  std::unique_ptr<ChunkReader> reader(new ChunkReader(device, std::move(requests)));
  for (size_t i = 0; i < std::min<size_t>(depth + 1, reader->requests_.size()); ++i) {
    Buffer buffer;
    buffer.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(align, align_up(bytes_max, align))));
    if (!buffer.bytes)
      return make_error(ErrorCode::kNoMemory, "no memory for {} read buffers of {}", depth + 1,
                        format_bytes(bytes_max));
    reader->buffers_.push_back(std::move(buffer));
  }
  return reader;
}

ChunkReader::~ChunkReader() {
  while (in_flight_ > 0) collect(true);
}

void ChunkReader::submit_next() {
  const ChunkRequest& request = requests_[submitted_];
  Buffer& buffer = buffers_[submitted_ % buffers_.size()];
  buffer.done = false;
  device_.submit({.file = request.file,
                  .offset = aligned_begin(request),
                  .bytes = aligned_bytes(request),
                  .bytes_needed = request.offset + request.bytes - aligned_begin(request),
                  .destination = buffer.bytes.get(),
                  .tag = submitted_});
  ++submitted_;
  ++in_flight_;
}

void ChunkReader::collect(bool block) {
  completions_.clear();
  block ? device_.wait(completions_) : device_.poll(completions_);
  for (ReadCompletion& completion : completions_) {
    Buffer& buffer = buffers_[completion.tag % buffers_.size()];
    buffer.status = std::move(completion.status);
    buffer.done = true;
    --in_flight_;
  }
}

Result<std::span<const std::byte>> ChunkReader::next() {
  SLUICE_ASSERT(taken_ < requests_.size(), "all {} ranges have been read", requests_.size());
  // The buffer handed out last is free again only now: taken_ - 1 shares no buffer with what may be submitted.
  while (submitted_ < requests_.size() && submitted_ < taken_ + buffers_.size()) submit_next();
  const Buffer& buffer = buffers_[taken_ % buffers_.size()];
  collect(false);  // also starts what was submitted
  while (!buffer.done) collect(true);
  if (!buffer.status) return buffer.status.error();
  const ChunkRequest& request = requests_[taken_++];
  return std::span<const std::byte>(buffer.bytes.get() + (request.offset - aligned_begin(request)), request.bytes);
}

}  // namespace sluice
