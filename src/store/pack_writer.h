// Makes a pack from a model: the dense part as model.gguf, every expert as one aligned record of experts.sluice
// (store/pack_format.h). Whole or not at all: written into a folder of a temporary name, synced, read back, renamed.
//
// Same in  the same model gives the same bytes, at any time and place.
// Replaces a folder that holds a pack of the same model and nothing else; anything else that stands at the target is
//          refused.
// Holes    where experts would be in model.gguf the file takes nothing of the disk, but for what store/hole_guard.h
// puts
//          there.
// Memory   some of the largest matrices of an expert, a few dozen MiB at least, whatever the model's size.
// Errors   kBadArgument (the target; the disk is full, with needed and free bytes), kChanged (the source changed
//          meanwhile), kBadFile (reading back found other bytes), kCancelled, kDeviceError. Nothing is left behind.
// Threads  one call at a time for a target; a second process is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/result.h"
#include "base/work_progress.h"
#include "io/device.h"
#include "store/catalog.h"
#include "store/pack_format.h"

namespace sluice {

// Turns one expert's matrix into the bytes that this machine's kernels want. The seam to the computation.
class SlabTransform {
 public:
  virtual ~SlabTransform() = default;
  // For which machines and libraries the result is good: equal tags, equal bytes.
  virtual std::string tag() const = 0;
  virtual bool applies(const ExpertTensorShape& shape) const = 0;
  // `to` has as many bytes as `from`: shape.slab_bytes.
  virtual Status apply(const ExpertTensorShape& shape, const std::byte* from, std::byte* to) const = 0;
};

struct PackOptions {
  const SlabTransform* transform = nullptr;  // none: layout raw
  bool read_back = true;
  WorkProgress on_progress;
};

struct PackReport {
  PackId id;
  uint64_t experts_file_bytes = 0;
  uint64_t dense_bytes = 0;
  uint64_t n_record = 0;
  uint64_t n_native = 0;  // matrices that the transform rearranged
};

// `device` reads the catalog's files.
Result<PackReport> write_pack(const Catalog& catalog, Device& device, const std::string& folder,
                              const PackOptions& options);

// What a pack is called when nobody says: beside the model, without a part's numbers and without ".gguf".
std::string default_pack_folder(const std::string& model_path);

}  // namespace sluice
