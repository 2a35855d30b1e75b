// Which layer to predict and prefetch for while a layer runs: the schedule of look-ahead. Pure; a table made once.
//
// Distance  early layers look a short way ahead, where predictions are still good; from the cut-off on they look
// further,
//           to give the drive more time. Counted in layers that have streamed experts, dense ones do not count.
// Target    the layer at that distance. Past the last layer there is none: the source layer is skipped, never clamped
// to
//           the last one, or several sources would fill the same layer and overwrite each other's loads. For the same
//           reason a layer that an earlier source has for its target is not the target of a later one, which could
//           happen where the distance shrinks at the cut-off. So each layer is the target at most once a forward.
// Units     layers are the model's numbers.
// Misuse    layers that do not rise assert; layers that were not given have no target.
// Threads   const after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice {

struct LookAheadOptions {
  uint32_t ahead_lo = 1;  // distance of layers below the cut-off, at least 1 (0 counts as 1)
  uint32_t ahead_hi = 1;  // of the others
  uint32_t cutoff = 0;    // a layer number
};

class LookAhead {
 public:
  // `layers` are those with streamed experts, rising.
  LookAhead(std::span<const uint32_t> layers, const LookAheadOptions& options);

  std::optional<uint32_t> target_for(uint32_t layer) const {
    return layer < targets_.size() ? targets_[layer] : std::nullopt;
  }

 private:
  std::vector<std::optional<uint32_t>> targets_;  // by layer number
};

}  // namespace sluice
