#include "cli/probe_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

namespace sluice {

namespace {

using View = std::pair<PredictionView, uint32_t>;  // and its distance
using Recall = std::array<double, 3>;

std::string view_title(const View& view) {
  switch (view.first) {
    case PredictionView::kBeforeAttention: return fmt::format("before attention, {} ahead", view.second);
    case PredictionView::kBlockInput: return "block input";
    case PredictionView::kLastToken: return "last token";
  }
  return "";
}

Recall recall_of(const RecallCounts& counts) {
  const auto wanted = static_cast<double>(counts.wanted);
  return {static_cast<double>(counts.found_at_1x) / wanted, static_cast<double>(counts.found_at_1_5x) / wanted,
          static_cast<double>(counts.found_at_2x) / wanted};
}

}  // namespace

std::string format_recall(std::span<const RecallCounts> recall, uint32_t top_k) {
  std::set<View> views;
  std::set<uint32_t> layers;
  std::map<std::pair<uint32_t, View>, Recall> cells;
  for (const RecallCounts& counts : recall) {
    const View view{counts.view, counts.distance};
    views.insert(view);
    layers.insert(counts.layer);
    cells[{counts.layer, view}] = recall_of(counts);
  }
  const std::array<uint32_t, 3> ks = {top_k, top_k + top_k / 2, 2 * top_k};
  std::string head = "| layer |";
  std::string rule = "| --- |";
  for (const View& view : views) {
    for (const uint32_t k : ks) {
      head += fmt::format(" {} @{} |", view_title(view), k);
      rule += " --- |";
    }
  }
  std::string rows;
  std::map<View, std::pair<Recall, uint32_t>> sums;
  for (const uint32_t layer : layers) {
    rows += fmt::format("| {} |", layer);
    for (const View& view : views) {
      const auto cell = cells.find({layer, view});
      if (cell == cells.end()) {
        rows += " - | - | - |";
        continue;
      }
      auto& [sum, n_layer] = sums[view];
      ++n_layer;
      for (size_t i = 0; i < ks.size(); ++i) {
        sum[i] += cell->second[i];
        rows += fmt::format(" {:.3f} |", cell->second[i]);
      }
    }
    rows += '\n';
  }
  rows += "| mean |";
  for (const View& view : views) {
    const auto& [sum, n_layer] = sums[view];
    for (const double value : sum) rows += fmt::format(" {:.3f} |", value / n_layer);
  }
  return head + '\n' + rule + '\n' + rows + '\n';
}

}  // namespace sluice
