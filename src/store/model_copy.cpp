#include "store/model_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "store/gguf_header.h"

namespace sluice {

namespace {

constexpr uint64_t kChunkBytes = kMiB;
constexpr uint64_t kHeadBytesDefault = kMiB;

// What must be equal to the last byte: everything before the first tensor's data.
Result<uint64_t> head_bytes(const File& file) {
  uint64_t bytes = std::min(file.size_bytes(), kHeadBytesDefault);
  char magic[4] = {};
  if (file.size_bytes() < sizeof(magic)) return bytes;
  if (Status status = file.read_exactly(0, magic, sizeof(magic)); !status) return status.error();
  if (std::memcmp(magic, GGUF_MAGIC, sizeof(magic)) != 0) return bytes;
  const auto header = read_gguf_header(file);
  if (!header) return header.error();
  uint64_t first = file.size_bytes();
  for (const HeaderTensor& tensor : header->tensors) first = std::min(first, tensor.offset);
  return first;
}

Status compare_range(const File& original, const File& copy, uint64_t offset, uint64_t bytes) {
  std::vector<std::byte> ours(std::min(bytes, kChunkBytes));
  std::vector<std::byte> theirs(ours.size());
  for (uint64_t done = 0; done < bytes; done += ours.size()) {
    const uint64_t piece = std::min<uint64_t>(ours.size(), bytes - done);
    if (Status status = original.read_exactly(offset + done, ours.data(), piece); !status) return status;
    if (Status status = copy.read_exactly(offset + done, theirs.data(), piece); !status) return status;
    const auto end = ours.begin() + static_cast<std::ptrdiff_t>(piece);
    const auto differs = std::mismatch(ours.begin(), end, theirs.begin()).first;
    if (differs != end) {
      return make_error(ErrorCode::kBadFile, "mirror: '{}' is no copy of '{}': byte {} differs", copy.path(),
                        original.path(), offset + done + static_cast<uint64_t>(differs - ours.begin()));
    }
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const File>> open_model_copy(const File& original, const std::string& folder, DirectMode mode) {
  const std::string name = std::filesystem::path(original.path()).filename();
  const std::string path = (std::filesystem::path(folder) / name).string();
  auto copy = File::open(path, mode);
  if (!copy) {
    const Error& error = copy.error();
    return Error{error.code, fmt::format("mirror: {}", error.text), error.system_error};
  }
  if ((*copy)->device() == original.device() && (*copy)->inode() == original.inode()) {
    return make_error(ErrorCode::kBadArgument, "mirror: '{}' is the model's own file, not a copy of it", path);
  }
  if ((*copy)->size_bytes() != original.size_bytes()) {
    return make_error(ErrorCode::kBadFile, "mirror: '{}' is no copy of '{}': it has {} bytes, not {}", path,
                      original.path(), (*copy)->size_bytes(), original.size_bytes());
  }
  const auto head = head_bytes(original);
  if (!head) return head.error();
  if (Status status = compare_range(original, **copy, 0, *head); !status) return status.error();

  const uint64_t rest = original.size_bytes() - *head;
  std::mt19937_64 random(original.size_bytes());
  for (unsigned i = 0; i < kSampleCount && rest > 0; ++i) {
    const uint64_t begin = *head + rest / kSampleCount * i;
    const uint64_t end = i + 1 == kSampleCount ? original.size_bytes() : begin + rest / kSampleCount;
    const uint64_t bytes = std::min(kSampleBytes, end - begin);
    // The last sample ends with the file.
    const uint64_t offset = i + 1 == kSampleCount ? end - bytes : begin + random() % (end - begin - bytes + 1);
    if (Status status = compare_range(original, **copy, offset, bytes); !status) return status.error();
  }
  return copy;
}

}  // namespace sluice
