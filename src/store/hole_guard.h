// What stands in the hole where a pack's experts would be in model.gguf, so that an engine that knows nothing of packs
// computes nothing that looks like an answer: a few bytes at fixed places of each expert's matrices; all else is zero.
//
// NaN      in most types a block of 0xff has NaN as its scale. One in `down` makes every result NaN, whatever comes in.
// Without  a NaN (MXFP4, NVFP4) the largest numbers do it, through all matrices, because an input of zeros would hide
// one
//          in `down`: gate and up get a row of each sign, so that one passes the activation and their product
//          overflows, and `down` turns what a clamped activation leaves of it into infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/expert_tensor.h"

namespace sluice {

struct GuardPatch {
  uint64_t offset = 0;  // in the expert's slab
  std::vector<std::byte> bytes;
};

// Of one expert's matrix; none where the other matrices' guards are enough.
std::vector<GuardPatch> hole_guard(MatrixRole role, const ExpertTensorShape& shape);

}  // namespace sluice
