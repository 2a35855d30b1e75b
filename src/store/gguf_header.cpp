#include "store/gguf_header.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <unordered_set>
#include <utility>

namespace sluice {

namespace {

constexpr uint64_t kReadChunkBytes = 64 * kKiB;
constexpr char kMagic[] = {'G', 'G', 'U', 'F'};

// Walks over a header once, from front to back. After the first fault every step returns false and error() tells it.
class HeaderScanner {
 public:
  explicit HeaderScanner(const File& file) : file_(file) {}

  bool scan() {
    uint64_t n_keys = 0;
    uint64_t n_tensors = 0;
    return scan_preamble(n_tensors, n_keys) && scan_keys(n_keys) && scan_tensors(n_tensors) && check_not_glued();
  }

  const Error& error() const { return *error_; }
  std::vector<uint8_t> take_bytes() { return std::move(bytes_); }
  std::vector<HeaderTensor> take_tensors() { return std::move(tensors_); }

 private:
  template <typename... Args>
  bool fail(fmt::format_string<Args...> format, Args&&... args) {
    error_ = make_error(ErrorCode::kBadFile, "{}: {}", file_.path(), fmt::format(format, std::forward<Args>(args)...));
    return false;
  }

  // Makes the next `wanted` bytes of the header present in bytes_.
  bool require(uint64_t wanted, std::string_view field) {
    const uint64_t left = file_.size_bytes() - position_;
    if (wanted > left) {
      return fail("{}: {} bytes are wanted at offset {}, the file has {} more", field, wanted, position_, left);
    }
    if (wanted > kHeaderBytesMax - position_) {
      return fail("{}: the header is larger than {}", field, format_bytes(kHeaderBytesMax));
    }
    if (position_ + wanted <= bytes_.size()) return true;

    const uint64_t have = bytes_.size();
    const uint64_t grown = std::max(position_ + wanted, have + std::max(have / 2, kReadChunkBytes));
    const uint64_t target = std::min({grown, file_.size_bytes(), kHeaderBytesMax});
    bytes_.resize(target);
    const Status status = file_.read_exactly(have, bytes_.data() + have, target - have);
    if (!status) error_ = status.error();
    return status.ok();
  }

  template <typename T>
  bool take(T& value, std::string_view field) {
    if (!require(sizeof(T), field)) return false;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return true;
  }

  bool skip(uint64_t count, std::string_view field) {
    if (!require(count, field)) return false;
    position_ += count;
    return true;
  }

  bool skip_string(std::string_view field) {
    uint64_t length = 0;
    return take(length, field) && skip(length, field);
  }

  // Names and keys are C strings inside ggml: a zero byte would make two different ones the same.
  bool take_identifier(std::string& text, std::string_view field) {
    uint64_t length = 0;
    if (!take(length, field) || !require(length, field)) return false;
    text.assign(reinterpret_cast<const char*>(bytes_.data()) + position_, length);
    position_ += length;
    if (text.empty()) return fail("{} is empty", field);
    if (text.find('\0') != std::string::npos) return fail("{} holds a zero byte", field);
    return true;
  }

  bool scan_preamble(uint64_t& n_tensors, uint64_t& n_keys) {
    char magic[sizeof(kMagic)];
    if (!take(magic, "magic")) return false;
    if (std::memcmp(magic, kMagic, sizeof(kMagic)) != 0) {
      return fail("magic: wanted 'GGUF', found '{}'", printable({magic, sizeof(magic)}));
    }
    uint32_t version = 0;
    if (!take(version, "version")) return false;
    if ((version & 0xffff) == 0 && version != 0) return fail("version: {:#010x}, a big-endian file", version);
    if (version < 2 || version > GGUF_VERSION) return fail("version: wanted 2 to {}, found {}", GGUF_VERSION, version);
    if (!take(n_tensors, "tensor count") || !take(n_keys, "key count")) return false;
    if (n_tensors > kHeaderTensorsMax) return fail("tensor count: {}, at most {}", n_tensors, kHeaderTensorsMax);
    if (n_keys > kHeaderKeysMax) return fail("key count: {}, at most {}", n_keys, kHeaderKeysMax);
    return true;
  }

  bool scan_keys(uint64_t n_keys) {
    std::unordered_set<std::string> seen;
    for (uint64_t i = 0; i < n_keys; ++i) {
      std::string key;
      if (!take_identifier(key, fmt::format("key {}", i))) return false;
      const std::string field = fmt::format("key '{}'", printable(key));
      if (!seen.insert(key).second) return fail("{} stands there twice", field);
      int32_t type = 0;
      if (!take(type, field)) return false;
      if (key == GGUF_KEY_GENERAL_ALIGNMENT && !peek_alignment(type)) return false;
      if (type == GGUF_TYPE_ARRAY ? !scan_array(field) : !scan_values(type, 1, field)) return false;
    }
    return true;
  }

  bool scan_array(std::string_view field) {
    int32_t type = 0;
    uint64_t count = 0;
    if (!take(type, field) || !take(count, field)) return false;
    if (type == GGUF_TYPE_ARRAY) return fail("{}: an array of arrays", field);
    if (type == GGUF_TYPE_STRING) {
      if (count > kHeaderStringsMax - strings_) return fail("{}: more than {} texts", field, kHeaderStringsMax);
      strings_ += count;
    }
    return scan_values(type, count, field);
  }

  bool scan_values(int32_t type, uint64_t count, std::string_view field) {
    if (type < 0 || type >= GGUF_TYPE_COUNT) return fail("{}: unknown value type {}", field, type);
    if (type == GGUF_TYPE_STRING) {
      for (uint64_t i = 0; i < count; ++i) {
        if (!skip_string(field)) return false;
      }
      return true;
    }
    // An element has at most 8 bytes, and no array is longer than the header may be.
    if (count > kHeaderBytesMax) return fail("{}: an array of {} elements", field, count);
    return skip(count * value_bytes(type), field);
  }

  static uint64_t value_bytes(int32_t type) {
    switch (type) {
      case GGUF_TYPE_UINT8:
      case GGUF_TYPE_INT8:
      case GGUF_TYPE_BOOL: return 1;
      case GGUF_TYPE_UINT16:
      case GGUF_TYPE_INT16: return 2;
      case GGUF_TYPE_UINT32:
      case GGUF_TYPE_INT32:
      case GGUF_TYPE_FLOAT32: return 4;
      default: return 8;
    }
  }

  bool peek_alignment(int32_t type) {
    if (type != GGUF_TYPE_UINT32) return fail("key '{}': wanted a u32", GGUF_KEY_GENERAL_ALIGNMENT);
    uint32_t value = 0;
    if (!take(value, GGUF_KEY_GENERAL_ALIGNMENT)) return false;
    position_ -= sizeof(value);
    if (!is_power_of_two(value)) {
      return fail("key '{}': wanted a power of two, found {}", GGUF_KEY_GENERAL_ALIGNMENT, value);
    }
    alignment_ = value;
    return true;
  }

  bool scan_tensors(uint64_t n_tensors) {
    std::unordered_set<std::string> seen;
    std::vector<uint64_t> offsets;  // as in the file: from the start of the data
    for (uint64_t i = 0; i < n_tensors; ++i) {
      HeaderTensor tensor;
      if (!take_identifier(tensor.name, fmt::format("name of tensor {}", i))) return false;
      const std::string field = fmt::format("tensor '{}'", printable(tensor.name));
      if (tensor.name.size() >= GGML_MAX_NAME) {
        return fail("{}: the name has {} bytes, at most {}", field, tensor.name.size(), GGML_MAX_NAME - 1);
      }
      if (!seen.insert(tensor.name).second) return fail("{} stands there twice", field);
      uint64_t offset = 0;
      if (!scan_shape(tensor, field) || !scan_type(tensor, field) || !take(offset, field)) return false;
      offsets.push_back(offset);
      tensors_.push_back(std::move(tensor));
    }
    return place_tensors(offsets);
  }

  bool scan_shape(HeaderTensor& tensor, std::string_view field) {
    uint32_t n_dims = 0;
    if (!take(n_dims, field)) return false;
    if (n_dims > GGML_MAX_DIMS) return fail("{}: {} dimensions, at most {}", field, n_dims, GGML_MAX_DIMS);
    uint64_t elements = 1;
    for (uint32_t i = 0; i < n_dims; ++i) {
      if (!take(tensor.ne[i], field)) return false;
      if (tensor.ne[i] <= 0) return fail("{}: dimension {} is {}", field, i, tensor.ne[i]);
      const auto product = checked_mul(elements, static_cast<uint64_t>(tensor.ne[i]));
      if (!product || *product > std::numeric_limits<int64_t>::max()) return fail("{}: the shape overflows", field);
      elements = *product;
    }
    return true;
  }

  bool scan_type(HeaderTensor& tensor, std::string_view field) {
    int32_t type = 0;
    if (!take(type, field)) return false;
    if (type < 0 || type >= GGML_TYPE_COUNT) return fail("{}: unknown type {}", field, type);
    tensor.type = static_cast<ggml_type>(type);
    const int64_t block_elements = ggml_blck_size(tensor.type);
    const uint64_t block_bytes = ggml_type_size(tensor.type);
    if (block_elements == 0) return fail("{}: type {} was withdrawn from the format", field, type);
    if (tensor.ne[0] % block_elements != 0) {
      return fail("{}: rows of {} elements, but {} has blocks of {}", field, tensor.ne[0], ggml_type_name(tensor.type),
                  block_elements);
    }
    // ggml multiplies the row's elements by the block's bytes before it divides by the block's elements.
    const auto row_product = checked_mul(static_cast<uint64_t>(tensor.ne[0]), block_bytes);
    auto bytes = row_product;
    if (bytes) *bytes /= static_cast<uint64_t>(block_elements);
    for (int i = 1; i < GGML_MAX_DIMS && bytes; ++i) bytes = checked_mul(*bytes, static_cast<uint64_t>(tensor.ne[i]));
    if (!bytes) return fail("{}: its size overflows", field);
    tensor.bytes = *bytes;
    return true;
  }

  // Regions in table order, each starting where the one before it ends, padding included: so none can overlap.
  bool place_tensors(const std::vector<uint64_t>& offsets) {
    data_end_ = position_;
    if (tensors_.empty()) return true;
    const uint64_t data_start = align_up(position_, alignment_);
    if (data_start > file_.size_bytes()) {
      return fail("tensor data starts at offset {}, the file has {} bytes", data_start, file_.size_bytes());
    }
    uint64_t expected = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      HeaderTensor& tensor = tensors_[i];
      const std::string field = fmt::format("tensor '{}'", printable(tensor.name));
      if (offsets[i] < expected) return fail("{}: offset {} lies inside the tensor before it", field, offsets[i]);
      if (offsets[i] > expected) return fail("{}: offset {}, expected {}", field, offsets[i], expected);
      const uint64_t data_left = file_.size_bytes() - data_start;
      if (offsets[i] > data_left || tensor.bytes > data_left - offsets[i]) {
        return fail("{}: {} bytes at offset {}, but the file ends at {}", field, tensor.bytes, data_start + offsets[i],
                    file_.size_bytes());
      }
      tensor.offset = data_start + offsets[i];
      data_end_ = tensor.offset + tensor.bytes;
      // The last tensor's padding may be missing, and the sum is then at most one alignment past the file's end.
      expected = align_up(offsets[i] + tensor.bytes, alignment_);
    }
    return true;
  }

  bool check_not_glued() {
    for (const uint64_t offset : {data_end_, align_up(data_end_, alignment_)}) {
      if (offset > file_.size_bytes() || file_.size_bytes() - offset < sizeof(kMagic)) continue;
      char magic[sizeof(kMagic)];
      const Status status = file_.read_exactly(offset, magic, sizeof(magic));
      if (!status) {
        error_ = status.error();
        return false;
      }
      if (std::memcmp(magic, kMagic, sizeof(kMagic)) == 0) {
        return fail("another GGUF starts at offset {}: parts must stay separate files", offset);
      }
    }
    return true;
  }

  const File& file_;
  std::optional<Error> error_;
  std::vector<uint8_t> bytes_;  // the file from its start; never more than kHeaderBytesMax
  uint64_t position_ = 0;       // <= bytes_.size()
  uint64_t strings_ = 0;
  uint64_t alignment_ = GGUF_DEFAULT_ALIGNMENT;
  uint64_t data_end_ = 0;
  std::vector<HeaderTensor> tensors_;
};

size_t copy_header_bytes(void* userdata, void* output, uint64_t offset, size_t length) {
  const auto& bytes = *static_cast<const std::vector<uint8_t>*>(userdata);
  if (offset > bytes.size() || length > bytes.size() - offset) return 0;
  std::memcpy(output, bytes.data() + offset, length);
  return length;
}

Result<GgufHeader> read_header(const File& file) {
  HeaderScanner scanner(file);
  if (!scanner.scan()) return scanner.error();

  GgufHeader header;
  header.tensors = scanner.take_tensors();
  std::vector<uint8_t> bytes = scanner.take_bytes();
  header.context.reset(gguf_init_from_callback(copy_header_bytes, &bytes, std::numeric_limits<size_t>::max(),
                                               file.size_bytes(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
  if (!header.context) {
    return make_error(ErrorCode::kBadFile, "{}: ggml's reader refuses the header", file.path());
  }
  return header;
}

template <typename T>
std::optional<uint64_t> greatest(const void* data, size_t count) {
  const T* values = static_cast<const T*>(data);
  T most = 0;
  for (size_t i = 0; i < count; ++i) {
    if (std::cmp_less(values[i], 0)) return std::nullopt;
    most = std::max(most, values[i]);
  }
  return static_cast<uint64_t>(most);
}

}  // namespace

Result<GgufHeader> read_gguf_header(const File& file) {
  try {
    return read_header(file);
  } catch (const std::bad_alloc&) {
    return make_error(ErrorCode::kNoMemory, "{}: no memory for the header", file.path());
  }
}

Result<std::optional<uint64_t>> find_unsigned(const gguf_context& context, const std::string& key,
                                              const std::string& path) {
  const int64_t index = gguf_find_key(&context, key.c_str());
  if (index < 0) return std::optional<uint64_t>();
  gguf_type type = gguf_get_kv_type(&context, index);
  const bool is_array = type == GGUF_TYPE_ARRAY;
  if (is_array) type = gguf_get_arr_type(&context, index);

  std::optional<uint64_t> value;
  if (type != GGUF_TYPE_STRING) {
    const void* data = is_array ? gguf_get_arr_data(&context, index) : gguf_get_val_data(&context, index);
    const size_t count = is_array ? gguf_get_arr_n(&context, index) : 1;
    switch (type) {
      case GGUF_TYPE_UINT8: value = greatest<uint8_t>(data, count); break;
      case GGUF_TYPE_INT8: value = greatest<int8_t>(data, count); break;
      case GGUF_TYPE_UINT16: value = greatest<uint16_t>(data, count); break;
      case GGUF_TYPE_INT16: value = greatest<int16_t>(data, count); break;
      case GGUF_TYPE_UINT32: value = greatest<uint32_t>(data, count); break;
      case GGUF_TYPE_INT32: value = greatest<int32_t>(data, count); break;
      case GGUF_TYPE_UINT64: value = greatest<uint64_t>(data, count); break;
      case GGUF_TYPE_INT64: value = greatest<int64_t>(data, count); break;
      default: break;
    }
  }
  if (!value) {
    return make_error(ErrorCode::kBadFile, "{}: key '{}': wanted a whole number, not negative", path, printable(key));
  }
  return value;
}

Result<std::optional<std::string>> find_text(const gguf_context& context, const std::string& key,
                                             const std::string& path) {
  const int64_t index = gguf_find_key(&context, key.c_str());
  if (index < 0) return std::optional<std::string>();
  if (gguf_get_kv_type(&context, index) != GGUF_TYPE_STRING) {
    return make_error(ErrorCode::kBadFile, "{}: key '{}': wanted a text", path, printable(key));
  }
  return std::optional<std::string>(gguf_get_val_str(&context, index));
}

std::string printable(std::string_view text) {
  constexpr size_t kBytesMax = 96;
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const unsigned char next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    // Cut before a character's first byte, but never later than a character's length behind the limit.
    const bool inside_character = (c & 0xc0) == 0x80 && line.size() < kBytesMax + 3;
    if (line.size() >= kBytesMax && !inside_character) return line + "...";
    if (c < 0x20 || c == 0x7f) {
      line += '?';
    } else if (c == 0xc2 && next >= 0x80 && next < 0xa0) {
      line += '?';  // the control characters U+0080 to U+009F
      ++i;
    } else {
      line += static_cast<char>(c);
    }
  }
  return line;
}

}  // namespace sluice
