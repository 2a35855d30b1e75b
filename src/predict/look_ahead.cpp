#include "predict/look_ahead.h"

#include <algorithm>

#include "base/assert.h"

namespace sluice {

LookAhead::LookAhead(std::span<const uint32_t> layers, const LookAheadOptions& options) {
  if (layers.empty()) return;
  targets_.resize(size_t{layers.back()} + 1);
  std::vector<bool> taken(layers.size(), false);
  for (size_t i = 0; i < layers.size(); ++i) {
    SLUICE_ASSERT(i == 0 || layers[i] > layers[i - 1], "layer {} behind layer {}", layers[i], layers[i - 1]);
    const size_t ahead = std::max(layers[i] < options.cutoff ? options.ahead_lo : options.ahead_hi, 1U);
    const size_t target = i + ahead;
    if (target >= layers.size() || taken[target]) continue;
    taken[target] = true;
    targets_[layers[i]] = layers[target];
  }
}

}  // namespace sluice
