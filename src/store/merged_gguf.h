// A catalog's model as one GGUF: the header that such a file would have, and where each tensor would stand. A split
// model becomes a single file; nothing is written here (store/model_stream.h reads it, store/pack_writer.h writes it).
//
// Header   the metadata of the first file without the split.* keys, then the tensor table in catalog order, padded to
//          the first file's alignment.
// Errors   kBadFile, kShortRead, kDeviceError, kChanged.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/result.h"
#include "store/catalog.h"

struct gguf_context;

namespace sluice {

struct MergedGguf {
  std::vector<uint8_t> header;
  std::vector<uint64_t> offsets;  // parallel to Catalog::tensors, from the start of the file
  uint64_t size_bytes = 0;
};

// `edit` may change the metadata before the header is made.
Result<MergedGguf> merge_gguf(const Catalog& catalog, const std::function<void(gguf_context*)>& edit = {});

}  // namespace sluice
