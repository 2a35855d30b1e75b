// A large file that is written as a stream and stands under its own name only when it is complete; until then it ends
// in ".tmp", and after an error it is gone.
//
// Errors   kBadArgument when it cannot be created; kDeviceError, with path and errno, when the disk is full or broken.
// Threads  thread-compatible.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/result.h"

namespace sluice::tools {

class OutputFile {
 public:
  explicit OutputFile(std::string path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Refuses a path where something other than a regular file stands.
  Status open();
  Status write(std::span<const std::byte> bytes);
  Status finish();

 private:
  const std::string path_;
  const std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace sluice::tools
