// Index types, so that two integers cannot be swapped by mistake.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace sluice {

// One routed FFN of the model: the real layer number (dense layers count too) and the router's id within it.
struct ExpertId {
  uint32_t layer = 0;
  uint32_t expert = 0;
  auto operator<=>(const ExpertId&) const = default;
};

// A slot at one point of its life. The generation is bumped whenever the slot gives up its expert, so a stale
// reference can be told from a live one.
struct SlotRef {
  uint32_t slot = 0;
  uint32_t generation = 0;
  auto operator<=>(const SlotRef&) const = default;
};

}  // namespace sluice

template <>
struct std::hash<sluice::ExpertId> {
  size_t operator()(const sluice::ExpertId& id) const noexcept {
    return std::hash<uint64_t>{}((uint64_t{id.layer} << 32) | id.expert);
  }
};
