// A model as one readable stream that llama.cpp can load (llama_model_load_from_file_ptr) without its experts being
// read: a split model looks like a single file, and a routed expert's range reads as zeros without touching the disk.
//
// Format   the catalog's metadata, without the split.* keys, then every tensor in catalog order at the alignment of
//          the first file: a GGUF of its own that exists only as this stream.
// Lifetime the FILE* keeps what it needs alive; the caller closes it with fclose after loading.
// Errors   kChanged, kBadFile, kDeviceError. A failing read of dense bytes shows as a short fread with errno set.
// Threads  one reader.
// Cost     an expert's bytes cost a copy within the cache: stdio copies whatever a stream of our own gives it.
// Portable fopencookie on Linux, funopen on macOS.
#pragma once

#include <cstdio>

#include "base/result.h"
#include "store/catalog.h"

namespace sluice {

Result<std::FILE*> open_model_stream(const Catalog& catalog);

}  // namespace sluice
