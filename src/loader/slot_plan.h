// How a budget becomes slots: the layout of one expert's record inside a slot, the size classes, and how many slots
// each class gets. Pure arithmetic; takes no memory.
//
// Layout   a slot holds one expert's spans (what one read brings: a matrix of a GGUF, a whole record of a pack), each in
//          a region of its own. Direct reads must start and end at multiples of the file's alignment, so a region is
//          read from the aligned offset below the span, and the span starts at (offset mod alignment) inside it: the
//          read lands in place and nothing is copied. Where that padding would cost more than kPaddingMax of the record
//          (small experts), regions are packed and reads go through staging buffers instead, with one copy.
// Budget   covers slots and staging. Slots are shared out to the classes by the bytes of their experts; each class
//          gets at least top-k slots, one token's working set in a layer: that is the stated minimum.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "io/file.h"
#include "store/catalog.h"
#include "store/expert_tensor.h"

namespace sluice {

// What one read brings of expert e: `bytes` at offset + e * stride_bytes.
struct SpanSource {
  std::shared_ptr<const File> file;
  uint64_t offset = 0;
  uint64_t stride_bytes = 0;
  uint64_t bytes = 0;

  uint64_t offset_of(uint32_t expert) const { return offset + expert * stride_bytes; }
  // Of a direct read: where the span starts inside it.
  uint64_t skip_of(uint32_t expert) const { return offset_of(expert) % file->align_bytes(); }
};

// One streamed matrix of a layer: where its slab lies in the span's bytes.
struct MatrixSource {
  MatrixRole role = MatrixRole::kGate;
  uint32_t span = 0;
  uint64_t offset = 0;
  uint64_t slab_bytes = 0;
};

struct LayerSource {
  uint32_t layer = 0;
  uint32_t n_expert = 0;
  std::vector<SpanSource> spans;
  std::vector<MatrixSource> matrices;  // at most one per role
  // Of each slab, [n_expert][matrices]; null where the files have none.
  std::shared_ptr<const std::vector<uint64_t>> checksums;

  // A matrix with a span of its own, as a plain GGUF has them.
  void add_matrix(MatrixRole role, std::shared_ptr<const File> file, uint64_t offset, uint64_t slab_bytes);
  uint64_t slab_offset(const MatrixSource& matrix, uint32_t expert) const {
    return spans[matrix.span].offset_of(expert) + matrix.offset;
  }
  uint64_t record_bytes() const;  // what is read of one expert
};

struct Region {
  uint64_t offset = 0;  // inside the slot
  uint64_t bytes = 0;
};

struct LayerLayout {
  uint32_t size_class = 0;
  bool staged = false;
  std::vector<Region> regions;  // parallel to LayerSource::spans
};

struct ClassPlan {
  uint64_t slot_bytes = 0;
  uint32_t n_slot = 0;
  uint32_t n_slot_min = 0;
  uint32_t n_slot_all = 0;  // every expert resident
};

struct SlotPlan {
  std::vector<LayerLayout> layouts;  // parallel to the sources
  std::vector<ClassPlan> classes;
  uint64_t staging_bytes = 0;        // of one staging buffer; 0 when no layer is staged
  uint32_t n_staging = 0;
  uint64_t bytes = 0;                // slots and staging
  uint64_t bytes_min = 0;            // the smallest budget that works
  uint64_t bytes_all = 0;            // every expert resident
  uint64_t expert_bytes = 0;

  uint32_t n_slot() const;
};

inline constexpr double kPaddingMax = 1.0 / 16;

// Layouts, classes and bounds; no slots yet. `per_layer`: a class of its own for each layer, which nobody else may take
// from, instead of one for all layers with equal slots.
SlotPlan plan_layout(const std::vector<LayerSource>& sources, uint32_t top_k, bool per_layer = false);
// Shares `budget_bytes` out. kNoMemory with wanted and given when it is below bytes_min.
Status plan_slots(SlotPlan& plan, uint64_t budget_bytes);

// The source of one layer of a catalog, and of all of them.
LayerSource layer_source(const Catalog& catalog, const ExpertLayer& layer);
std::vector<LayerSource> layer_sources(const Catalog& catalog);

}  // namespace sluice
