// The header of one GGUF file, checked before it is believed. Not a model (store/catalog.h puts parts together) and no
// tensor data.
//
// Order    every length, count, type, shape and offset is checked first; only then do the same bytes go to ggml's own
//          reader, which would allocate what a crafted file asks for and log several lines for one fault. What passes
//          here is accepted there.
// Layout   "GGUF", u32 version, i64 tensors, i64 keys, the keys with their values, the tensor table, padding, data.
//          Little-endian, versions 2 and 3. Tensor data lies in table order without gaps but for the padding.
// Limits   the constants below: several times what the largest known models need, and small enough that reading a
//          header takes bounded memory whatever the file says.
// Errors   kBadFile with file and field, kShortRead, kDeviceError, kNoMemory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "ggml.h"
#include "gguf.h"
#include "io/file.h"

namespace sluice {

inline constexpr uint64_t kHeaderBytesMax = 64 * kMiB;
inline constexpr uint64_t kHeaderKeysMax = 1 << 14;
inline constexpr uint64_t kHeaderTensorsMax = 1 << 16;
inline constexpr uint64_t kHeaderStringsMax = 1 << 21;  // elements of all string arrays together

struct GgufContextDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufContextPtr = std::unique_ptr<gguf_context, GgufContextDeleter>;

struct HeaderTensor {
  std::string name;
  ggml_type type = GGML_TYPE_COUNT;
  int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};
  uint64_t offset = 0;  // from the start of the file
  uint64_t bytes = 0;
};

struct GgufHeader {
  GgufContextPtr context;  // never null after read_gguf_header
  std::vector<HeaderTensor> tensors;
};

// Also refuses a file that holds another GGUF behind its own data: parts that were glued together.
Result<GgufHeader> read_gguf_header(const File& file);

// The value of a key that holds a whole number of any width, or the greatest of an array of them. Empty when the key is
// missing; kBadFile when it holds something else or a negative number.
Result<std::optional<uint64_t>> find_unsigned(const gguf_context& context, const std::string& key,
                                              const std::string& path);
// As find_unsigned, for text.
Result<std::optional<std::string>> find_text(const gguf_context& context, const std::string& key,
                                             const std::string& path);

// Text out of a file, fit for one line on a terminal: control characters become '?', and what is longer than a tensor's
// name can be is cut.
std::string printable(std::string_view text);

}  // namespace sluice
