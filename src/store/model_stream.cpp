#include "store/model_stream.h"

#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "store/merged_gguf.h"

namespace sluice {

namespace {

// What stdio reads at once: each seek of the loader reads this much again.
constexpr size_t kBufferBytes = 64 * kKiB;

// A tensor's place in the stream.
struct Segment {
  uint64_t offset = 0;
  FileRange source;
  bool is_expert = false;

  uint64_t end() const { return offset + source.bytes; }
};

class ModelStream {
 public:
  ModelStream(std::vector<std::shared_ptr<const File>> files, std::vector<uint8_t> header,
              std::vector<Segment> segments, uint64_t size)
      : files_(std::move(files)), header_(std::move(header)), segments_(std::move(segments)), size_(size) {}

  // As read(2): bytes read, 0 at the end, or -1 with errno.
  ssize_t read(char* buffer, size_t bytes) {
    const uint64_t wanted = std::min<uint64_t>(bytes, position_ < size_ ? size_ - position_ : 0);
    for (uint64_t done = 0; done < wanted;) {
      const uint64_t step = read_some(buffer + done, wanted - done);
      // What arrived before a fault counts; the next call meets the fault again and reports it.
      if (step == 0) return done > 0 ? static_cast<ssize_t>(done) : -1;
      position_ += step;
      done += step;
    }
    return static_cast<ssize_t>(wanted);
  }

  // As lseek(2): the new position, or -1 with errno.
  int64_t seek(int64_t offset, int whence) {
    const uint64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? position_ : size_;
    int64_t target = 0;
    if (__builtin_add_overflow(static_cast<int64_t>(base), offset, &target) || target < 0) {
      errno = EINVAL;
      return -1;
    }
    position_ = static_cast<uint64_t>(target);
    return target;
  }

  char* stdio_buffer() { return stdio_buffer_.data(); }

 private:
  // Serves at least one byte from the one region that the position lies in; 0 with errno when its file cannot be read.
  uint64_t read_some(char* buffer, uint64_t bytes) {
    if (position_ < header_.size()) {
      const uint64_t step = std::min(bytes, header_.size() - position_);
      std::memcpy(buffer, header_.data() + position_, step);
      return step;
    }
    // The first segment that ends behind the position: it lies there, or behind the padding before it.
    const auto next = std::partition_point(segments_.cbegin(), segments_.cend(),
                                           [&](const Segment& segment) { return segment.end() <= position_; });
    if (next == segments_.cend() || position_ < next->offset) {
      const uint64_t padding_end = next == segments_.cend() ? size_ : next->offset;
      const uint64_t step = std::min(bytes, padding_end - position_);
      std::memset(buffer, 0, step);
      return step;
    }
    const uint64_t step = std::min(bytes, next->end() - position_);
    if (next->is_expert) {
      std::memset(buffer, 0, step);
      return step;
    }
    const FileRange& source = next->source;
    const Status status = files_[source.file]->read_exactly(source.offset + (position_ - next->offset), buffer, step);
    if (status) return step;
    errno = status.error().system_error != 0 ? status.error().system_error : EIO;
    return 0;
  }

  std::vector<std::shared_ptr<const File>> files_;
  std::vector<uint8_t> header_;
  std::vector<Segment> segments_;  // by rising offset, the first at the header's end
  uint64_t size_;
  uint64_t position_ = 0;
  std::vector<char> stdio_buffer_ = std::vector<char>(kBufferBytes);
};

Result<std::unique_ptr<ModelStream>> make_stream(const Catalog& catalog) {
  auto merged = merge_gguf(catalog);
  if (!merged) return merged.error();
  std::vector<Segment> segments;
  for (size_t i = 0; i < catalog.tensors.size(); ++i) {
    const CatalogTensor& tensor = catalog.tensors[i];
    segments.push_back({merged->offsets[i], tensor.range, parse_expert_tensor_name(tensor.name).has_value()});
  }
  return std::make_unique<ModelStream>(catalog.files, std::move(merged->header), std::move(segments), merged->size_bytes);
}

#ifdef __APPLE__

int read_cookie(void* cookie, char* buffer, int bytes) {
  return static_cast<int>(static_cast<ModelStream*>(cookie)->read(buffer, static_cast<size_t>(bytes)));
}

fpos_t seek_cookie(void* cookie, fpos_t offset, int whence) {
  return static_cast<ModelStream*>(cookie)->seek(offset, whence);
}

int close_cookie(void* cookie) {
  delete static_cast<ModelStream*>(cookie);
  return 0;
}

std::FILE* open_cookie(ModelStream* stream) {
  return funopen(stream, read_cookie, nullptr, seek_cookie, close_cookie);
}

#else

ssize_t read_cookie(void* cookie, char* buffer, size_t bytes) {
  return static_cast<ModelStream*>(cookie)->read(buffer, bytes);
}

int seek_cookie(void* cookie, off64_t* offset, int whence) {
  const int64_t position = static_cast<ModelStream*>(cookie)->seek(*offset, whence);
  if (position < 0) return -1;
  *offset = position;
  return 0;
}

int close_cookie(void* cookie) {
  delete static_cast<ModelStream*>(cookie);
  return 0;
}

std::FILE* open_cookie(ModelStream* stream) {
  return fopencookie(stream, "rb", {read_cookie, nullptr, seek_cookie, close_cookie});
}

#endif

}  // namespace

Result<std::FILE*> open_model_stream(const Catalog& catalog) {
  auto stream = make_stream(catalog);
  if (!stream) return stream.error();
  std::FILE* file = open_cookie(stream->get());
  if (file == nullptr) return make_system_error(ErrorCode::kNoMemory, errno, "opening a stream over the model");
  char* stream_buffer = (*stream)->stdio_buffer();
  static_cast<void>(stream->release());  // fclose deletes it
  // glibc serves a cookie's reads through the buffer in any case, without one byte by byte.
  std::setvbuf(file, stream_buffer, _IOFBF, kBufferBytes);
  return file;
}

}  // namespace sluice
