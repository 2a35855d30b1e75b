// A file that appears under its name complete or not at all: written beside its target, renamed at the end.
// A target that exists and is no regular file (a pipe, /dev/stdout) is written directly instead.
//
// Errors   kBadArgument with path and errno: the folder is missing or not writable, the disk is full.
// Lifetime without commit() the target is left as it was and the temporary file is removed.
// Threads  thread-compatible.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include "base/result.h"

namespace sluice {

class OutputFile {
 public:
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  Status write(const void* data, size_t bytes);
  Status commit();
  // A whole text and nothing after it.
  Status write_and_commit(std::string_view text);

 private:
  OutputFile() = default;

  std::string path_;
  std::string temporary_path_;  // empty when written directly
  std::FILE* file_ = nullptr;
};

}  // namespace sluice
