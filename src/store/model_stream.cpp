#include "store/model_stream.h"

#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "store/gguf_header.h"

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

std::vector<uint8_t> meta_data(const gguf_context* context) {
  std::vector<uint8_t> bytes(gguf_get_meta_size(context));
  gguf_get_meta_data(context, bytes.data());
  return bytes;
}

// An empty GGUF whose tensors will be placed at `alignment`: gguf_set_val_u32 sets the key alone, only reading a header
// makes it count.
GgufContextPtr empty_context(uint32_t alignment) {
  GgufContextPtr context(gguf_init_empty());
  if (alignment == GGUF_DEFAULT_ALIGNMENT) return context;
  gguf_set_val_u32(context.get(), GGUF_KEY_GENERAL_ALIGNMENT, alignment);
  const std::vector<uint8_t> bytes = meta_data(context.get());
  context.reset(gguf_init_from_buffer(bytes.data(), bytes.size(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
  SLUICE_ASSERT(context != nullptr, "ggml does not read its own header with alignment {}", alignment);
  return context;
}

void add_tensor(gguf_context* context, const CatalogTensor& source) {
  ggml_tensor tensor{};
  tensor.type = source.type;
  std::copy(std::begin(source.ne), std::end(source.ne), std::begin(tensor.ne));
  tensor.nb[0] = ggml_type_size(source.type);
  tensor.nb[1] = ggml_row_size(source.type, source.ne[0]);
  for (int i = 2; i < GGML_MAX_DIMS; ++i) tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(source.ne[i - 1]);
  ggml_set_name(&tensor, source.name.c_str());
  gguf_add_tensor(context, &tensor);
}

Result<std::unique_ptr<ModelStream>> make_stream(const Catalog& catalog) {
  for (const auto& file : catalog.files) {
    const Status unchanged = file->check_unchanged();
    if (!unchanged) return unchanged.error();
  }
  const auto source = read_gguf_header(*catalog.files.front());
  if (!source) return source.error();
  const size_t alignment = gguf_get_alignment(source->context.get());
  const GgufContextPtr merged = empty_context(static_cast<uint32_t>(alignment));
  gguf_set_kv(merged.get(), source->context.get());
  for (const char* key : {"split.no", "split.count", "split.tensors.count"}) gguf_remove_key(merged.get(), key);
  for (const CatalogTensor& tensor : catalog.tensors) add_tensor(merged.get(), tensor);

  std::vector<uint8_t> header = meta_data(merged.get());
  std::vector<Segment> segments;
  uint64_t size = header.size();
  for (size_t i = 0; i < catalog.tensors.size(); ++i) {
    const CatalogTensor& tensor = catalog.tensors[i];
    const uint64_t offset = header.size() + gguf_get_tensor_offset(merged.get(), static_cast<int64_t>(i));
    segments.push_back({offset, tensor.range, parse_expert_tensor_name(tensor.name).has_value()});
    size = align_up(segments.back().end(), alignment);
  }
  if (size > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return make_error(ErrorCode::kBadFile, "{}: the parts' tensors add up to more than 2^63 bytes",
                      catalog.files.front()->path());
  }
  return std::make_unique<ModelStream>(catalog.files, std::move(header), std::move(segments), size);
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
