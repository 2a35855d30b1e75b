// Finds the file that a model's tensors come from, when a stock llama.cpp tool loads the model and tells nobody: from
// the address of a mapping, or among the files that the process has open. Finds or says no; never guesses.
//
// Mapping  /proc/self/maps gives device, inode and offset of an address; the file is opened through a descriptor of
//          this process that has the same device and inode (right even when the path was replaced), else by its path
//          if that still leads to the same inode.
// Bytes    for tensors that arrive as bytes: every regular file that this process has open and that starts as a GGUF
//          is searched for a tensor of the same name, type and shape. The caller compares the bytes.
// Threads  thread-compatible.
// Portable Linux's /proc; elsewhere nothing is found and experts are kept in memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "ggml.h"

namespace sluice {

struct FoundRange {
  std::shared_ptr<const File> file;
  uint64_t offset = 0;
};

class SourceFinder {
 public:
  explicit SourceFinder(DirectMode mode) : mode_(mode) {}

  // The file and offset that are mapped at `address`.
  std::optional<FoundRange> find_mapping(const void* address);
  // A tensor of an open GGUF.
  std::optional<FoundRange> find_tensor(const ggml_tensor* tensor);
  // kUnsupported when a GGUF was found that cannot be read as the mode demands: the model must be refused then, not
  // kept in memory.
  const Status& refusal() const { return refusal_; }

 private:
  using Identity = std::pair<uint64_t, uint64_t>;  // device, inode
  struct GgufTensor {
    ggml_type type = GGML_TYPE_COUNT;
    uint64_t bytes = 0;
    uint64_t offset = 0;
  };

  std::shared_ptr<const File> open(Identity identity, const std::string& path);
  std::vector<std::pair<Identity, std::string>> open_files() const;
  const std::map<std::string, GgufTensor>& gguf_tensors(const File& file);

  static bool is_gguf(const File& file);

  DirectMode mode_;
  Status refusal_;
  std::map<Identity, std::shared_ptr<const File>> files_;
  std::map<Identity, std::map<std::string, GgufTensor>> tensors_;
};

}  // namespace sluice
