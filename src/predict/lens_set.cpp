#include "predict/lens_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace sluice {

LensSet::LensSet(const Catalog& catalog) {
  uint32_t n_missing = 0;
  std::string first;
  for (const ExpertLayer& layer : catalog.expert_layers) {
    layers_.push_back(layer.layer);
    const auto weights = read_router_weights(catalog, layer.layer);
    if (weights) {
      add(RouterLens(*weights));
    } else if (n_missing++ == 0) {
      first = weights.error().message();
    }
  }
  if (n_missing > 0) {
    missing_ = fmt::format("{} of {} layers cannot be predicted: {}", n_missing, catalog.expert_layers.size(), first);
  }
}

LensSet::LensSet(std::vector<RouterLens> lenses) {
  for (RouterLens& lens : lenses) {
    layers_.push_back(lens.layer());
    add(std::move(lens));
  }
}

void LensSet::add(RouterLens lens) {
  if (by_layer_.size() <= lens.layer()) by_layer_.resize(lens.layer() + 1, kNone);
  by_layer_[lens.layer()] = static_cast<uint32_t>(lenses_.size());
  lenses_.push_back(std::move(lens));
}

std::optional<uint32_t> LensSet::layer_above(uint32_t layer, uint32_t distance) const {
  const auto first = std::upper_bound(layers_.begin(), layers_.end(), layer);
  if (distance == 0 || distance > static_cast<size_t>(layers_.end() - first)) return std::nullopt;
  return *(first + (distance - 1));
}

uint64_t LensSet::bytes() const {
  uint64_t total = 0;
  for (const RouterLens& lens : lenses_) total += lens.bytes();
  return total;
}

}  // namespace sluice
