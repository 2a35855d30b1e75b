// Where each expert's bytes are: one MoE model in GGUF, in one file or split into many, or a pack; opened and checked.
// Reads headers only. Not the loader of llama.cpp (which gets the model through store/model_stream.h) and not the
// tensors that a backend sees (store/expert_tensor.h has the words both use).
//
// Checks   all of a tensor's bytes lie inside its file, regions do not overlap, expert tensors of a layer agree in
//          n_expert and have the shapes of an FFN, parts of a split model belong together and none is missing.
//          After open() succeeded, no range in the catalog can point outside a file.
// Packs    (store/pack_format.h) look like the GGUF they were made from, but for the spans of their experts. The experts
//          file must be the one that model.gguf names, and have the same tensors.
// Sources  GGUF: ggml's docs/gguf.md, read through ggml's own gguf.h. Split naming: llama.cpp's llama_split_path
//          (PREFIX-00001-of-00003.gguf; part numbers 1-based in names, 0-based in split.no).
// Owns     the open files (shared).
// Errors   kNotFound (file or part, by name), kBadFile (with file and field), kUnsupported.
// Threads  const after open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/file.h"
#include "store/expert_tensor.h"
#include "store/pack_format.h"

namespace sluice {

// A byte range of one of the catalog's files.
struct FileRange {
  uint32_t file = 0;  // index into Catalog::files
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct CatalogTensor {
  std::string name;
  ggml_type type = GGML_TYPE_COUNT;
  int64_t ne[4] = {1, 1, 1, 1};
  FileRange range;
};

// What one read brings of an expert: `bytes` at offset + expert * stride_bytes. A plain GGUF has a span for each matrix, a
// pack one for all of them.
struct ExpertSpan {
  uint32_t file = 0;  // index into Catalog::files
  uint64_t offset = 0;
  uint64_t stride_bytes = 0;
  uint64_t bytes = 0;
};

struct ExpertMatrix {
  MatrixRole role = MatrixRole::kGate;
  ExpertTensorShape shape;
  uint32_t span = 0;    // index into ExpertLayer::spans
  uint64_t offset = 0;  // of the slab in the span's bytes
  bool native = false;  // rearranged for this machine's kernels; shape is the original's
};

// The routed experts of one layer. Matrices are ordered by role.
struct ExpertLayer {
  uint32_t layer = 0;
  uint32_t n_expert = 0;
  std::vector<ExpertSpan> spans;
  std::vector<ExpertMatrix> matrices;
  std::vector<std::string> side_tensors;
  // Of each slab, [n_expert][matrices], in the order of `matrices`; null where there are none (a plain GGUF).
  std::shared_ptr<const std::vector<uint64_t>> checksums;

  uint64_t record_bytes() const;  // one expert: all its slabs
  FileRange slab_range(const ExpertMatrix& matrix, uint32_t expert) const;
};

struct Catalog {
  // `path` may be any part of a split model, a pack's folder or its model.gguf.
  static Result<Catalog> open(const std::string& path, DirectMode mode);

  std::vector<std::shared_ptr<const File>> files;  // files[0] holds the metadata
  std::shared_ptr<const PackIndex> pack;           // null for a plain GGUF
  std::string architecture;
  std::string name;
  uint32_t n_layer = 0;                    // all of them, dense and nextn layers included
  uint32_t n_layer_nextn = 0;              // how many of the last ones only predict further tokens (MTP)
  uint32_t n_expert = 0;                   // as the metadata says; 0 for a dense model
  uint32_t n_expert_used = 0;              // top-k; 0 for a dense model
  std::vector<CatalogTensor> tensors;      // every tensor, in file order
  std::vector<ExpertLayer> expert_layers;  // by rising layer; empty for a dense model
  uint64_t expert_bytes = 0;
  uint64_t dense_bytes = 0;  // everything else, side tensors included

  bool is_moe() const { return !expert_layers.empty(); }

  // Blocking read of a part of one matrix's tensor, all experts side by side as a GGUF has them. kUnsupported for a native
  // layout: the original bytes are not there.
  Status read_experts(const ExpertLayer& layer, const ExpertMatrix& matrix, uint64_t offset, void* destination,
                      uint64_t bytes) const;
};

// Whether a GGUF is a pack's model.gguf, whose experts are in another file.
Result<bool> is_pack_model(const File& file);

}  // namespace sluice
