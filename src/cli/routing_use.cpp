#include "cli/routing_use.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace sluice {

namespace {

constexpr double kChoicesPerExpertMin = 4;
constexpr double kAboveChanceMin = 0.05;

// The mean of a normal distribution above its upper quartile, in deviations.
constexpr double kUpperQuarterMean = 1.2711;

}  // namespace

const char* routing_verdict_name(RoutingVerdict verdict) {
  switch (verdict) {
    case RoutingVerdict::kUneven: return "uneven";
    case RoutingVerdict::kUniform: return "uniform";
    case RoutingVerdict::kTooFewChoices: break;
  }
  return "too few choices";
}

RoutingUse measure_routing_use(const std::vector<std::vector<uint64_t>>& choices) {
  RoutingUse use;
  double layers = 0;
  double choices_per_expert = 0;
  for (const std::vector<uint64_t>& layer : choices) {
    const uint64_t sum = std::accumulate(layer.begin(), layer.end(), uint64_t{0});
    if (sum == 0 || layer.size() < 4) continue;
    const auto total = static_cast<double>(sum);
    const auto n_expert = static_cast<double>(layer.size());
    std::vector<uint64_t> sorted = layer;
    std::ranges::sort(sorted, std::greater());
    const auto quarter = static_cast<std::ptrdiff_t>(layer.size() / 4);
    const uint64_t hottest = std::accumulate(sorted.begin(), sorted.begin() + quarter, uint64_t{0});
    double entropy = 0;
    for (const uint64_t count : layer) {
      if (count == 0) continue;
      const double share = static_cast<double>(count) / total;
      entropy -= share * std::log(share);
    }
    use.choices += sum;
    use.hottest_quarter += static_cast<double>(hottest) / total;
    // Counts of chance have a deviation of the root of their mean.
    use.hottest_quarter_even +=
        static_cast<double>(quarter) / n_expert * (1 + kUpperQuarterMean / std::sqrt(total / n_expert));
    use.entropy += entropy / std::log(n_expert);
    choices_per_expert += total / n_expert;
    layers += 1;
  }
  if (layers == 0) return use;
  use.hottest_quarter /= layers;
  use.hottest_quarter_even /= layers;
  use.entropy /= layers;
  if (choices_per_expert / layers >= kChoicesPerExpertMin) {
    const bool above_chance = use.hottest_quarter >= use.hottest_quarter_even + kAboveChanceMin;
    use.verdict = above_chance ? RoutingVerdict::kUneven : RoutingVerdict::kUniform;
  }
  return use;
}

}  // namespace sluice
