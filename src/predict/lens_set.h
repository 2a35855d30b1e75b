// The router lenses of a model: one for each layer whose router could be read. A layer without one is never predicted.
//
// Owns     the lenses; const after create, so any thread may use them, each with a scratch of its own.
// Errors   none: what could not be read is said in missing(), one line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "predict/router_lens.h"
#include "store/catalog.h"

namespace sluice {

class LensSet {
 public:
  explicit LensSet(const Catalog& catalog);
  // Takes lenses as they are; the layers of `lenses` rise.
  explicit LensSet(std::vector<RouterLens> lenses);

  // nullptr: none.
  const RouterLens* find(uint32_t layer) const {
    return layer < by_layer_.size() && by_layer_[layer] != kNone ? &lenses_[by_layer_[layer]] : nullptr;
  }
  // The layer that is `distance` layers with experts above `layer`; `layer` need not have experts itself.
  std::optional<uint32_t> layer_above(uint32_t layer, uint32_t distance) const;
  const std::vector<uint32_t>& layers() const { return layers_; }  // with experts, rising
  bool empty() const { return lenses_.empty(); }
  uint64_t bytes() const;
  const std::string& missing() const { return missing_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  void add(RouterLens lens);

  std::vector<uint32_t> layers_;
  std::vector<RouterLens> lenses_;
  std::vector<uint32_t> by_layer_;
  std::string missing_;
};

}  // namespace sluice
