// Whether a run's routing is such that a cache of experts can help at all: how unevenly experts were used. A model with
// made-up weights uses all alike; measured with it, no policy and no budget looks good or bad. Pure.
//
// Figures  means over the layers that routed. hottest_quarter: share of all choices that went to the most used quarter
//          of the experts. hottest_quarter_even: what chance alone would give it with so few choices, had every expert
//          the same. entropy: of the use, 1 = all alike.
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

enum class RoutingVerdict {
  kUneven,
  kUniform,        // within 0.05 of chance: not representative of trained models
  kTooFewChoices,  // fewer than 4 per expert: nothing can be said
};
const char* routing_verdict_name(RoutingVerdict verdict);  // "uneven", "uniform", "too few choices"

struct RoutingUse {
  uint64_t choices = 0;
  double hottest_quarter = 0;
  double hottest_quarter_even = 0;
  double entropy = 0;
  RoutingVerdict verdict = RoutingVerdict::kTooFewChoices;
};

// `choices` is [layer][expert]; layers without choices are left out.
RoutingUse measure_routing_use(const std::vector<std::vector<uint64_t>>& choices);

}  // namespace sluice
