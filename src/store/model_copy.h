// A copy of one of a model's files in another folder, on another drive: found by its base name, opened, and compared
// with the original before anything is read from it in earnest.
//
// Compared  the size; all that stands before the data of a GGUF's first tensor (of any other file its first MiB); and
//           kSampleCount ranges of kSampleBytes, one in each stretch of the file, at places that depend on the size
//           alone. Not every byte: whoever needs that compares checksums when the copy is made.
// Errors    kNotFound, kBadFile (not a copy, with what differs and where), kBadArgument (the file itself), and what
//           opening and reading may say.
// Cost      reads some 300 KiB and the header from either drive.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "io/file.h"

namespace sluice {

inline constexpr unsigned kSampleCount = 64;
inline constexpr uint64_t kSampleBytes = 4096;

Result<std::shared_ptr<const File>> open_model_copy(const File& original, const std::string& folder, DirectMode mode);

}  // namespace sluice
