#include "backend/source_finder.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/log.h"
#include "gguf.h"

namespace sluice {

namespace {

struct Mapping {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t offset = 0;
  uint64_t device = 0;
  uint64_t inode = 0;
  std::string path;
};

std::optional<Mapping> mapping_at(uint64_t address) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    Mapping mapping;
    unsigned device_major = 0;
    unsigned device_minor = 0;
    int path_at = 0;
    const int fields = std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64 " %x:%x %" SCNu64 " %n", &mapping.begin,
                                   &mapping.end, &mapping.offset, &device_major, &device_minor, &mapping.inode, &path_at);
    if (fields < 6 || address < mapping.begin || address >= mapping.end) continue;
    if (mapping.inode == 0) return std::nullopt;  // anonymous memory
    mapping.device = makedev(device_major, device_minor);
    if (path_at > 0) mapping.path = line.substr(static_cast<size_t>(path_at));
    return mapping;
  }
  return std::nullopt;
}

}  // namespace

// Every regular file this process has open, with a path that opens the very same file again.
std::vector<std::pair<SourceFinder::Identity, std::string>> SourceFinder::open_files() const {
  std::vector<std::pair<Identity, std::string>> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    struct stat info = {};
    if (stat(entry.path().c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    // The path it was opened by, where that still leads to it: descriptors are closed, and their numbers taken again.
    const Identity identity{info.st_dev, info.st_ino};
    std::string path = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (stat(path.c_str(), &info) != 0 || Identity{info.st_dev, info.st_ino} != identity) path = entry.path().string();
    files.push_back({identity, std::move(path)});
  }
  return files;
}

std::shared_ptr<const File> SourceFinder::open(Identity identity, const std::string& path) {
  if (const auto it = files_.find(identity); it != files_.end()) return it->second;
  auto file = File::open(path, mode_);
  if (!file) {
    // The process may have other files open that direct I/O does not suit: those are nobody's fault.
    const bool demanded = file.error().code == ErrorCode::kUnsupported;
    const auto buffered = demanded ? File::open(path, DirectMode::kOff) : file;
    if (!demanded) {
      log_warning_once("{}", file.error().message());
    } else if (refusal_.ok() && buffered && is_gguf(**buffered)) {
      refusal_ = file.error();
    }
    return nullptr;
  }
  if (Identity{(*file)->device(), (*file)->inode()} != identity) return nullptr;
  return files_[identity] = *file;
}

bool SourceFinder::is_gguf(const File& file) {
  char magic[4] = {};
  return file.read_exactly(0, magic, sizeof(magic)).ok() && std::memcmp(magic, GGUF_MAGIC, sizeof(magic)) == 0;
}

std::optional<FoundRange> SourceFinder::find_mapping(const void* address) {
  const uint64_t at = reinterpret_cast<uintptr_t>(address);
  const auto mapping = mapping_at(at);
  if (!mapping) return std::nullopt;
  const Identity identity{mapping->device, mapping->inode};
  std::shared_ptr<const File> file;
  for (const auto& [other, path] : open_files()) {
    if (other == identity && (file = open(identity, path))) break;
  }
  if (!file && !mapping->path.empty()) file = open(identity, mapping->path);
  if (!file) return std::nullopt;
  return FoundRange{file, mapping->offset + (at - mapping->begin)};
}

const std::map<std::string, SourceFinder::GgufTensor>& SourceFinder::gguf_tensors(const File& file) {
  const Identity identity{file.device(), file.inode()};
  if (const auto it = tensors_.find(identity); it != tensors_.end()) return it->second;
  std::map<std::string, GgufTensor>& tensors = tensors_[identity];
  if (!is_gguf(file)) return tensors;
  // The loader of this process has read the same header before: it is sound.
  gguf_context* gguf = gguf_init_from_file(file.path().c_str(), {.no_alloc = true, .ctx = nullptr});
  if (gguf == nullptr) return tensors;
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    tensors[gguf_get_tensor_name(gguf, i)] = {gguf_get_tensor_type(gguf, i), gguf_get_tensor_size(gguf, i),
                                              gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i)};
  }
  gguf_free(gguf);
  return tensors;
}

std::optional<FoundRange> SourceFinder::find_tensor(const ggml_tensor* tensor) {
  for (const auto& [identity, path] : open_files()) {
    const std::shared_ptr<const File> file = open(identity, path);
    if (!file) continue;
    const auto& tensors = gguf_tensors(*file);
    const auto it = tensors.find(tensor->name);
    if (it == tensors.end() || it->second.type != tensor->type || it->second.bytes != ggml_nbytes(tensor)) continue;
    return FoundRange{file, it->second.offset};
  }
  return std::nullopt;
}

}  // namespace sluice
