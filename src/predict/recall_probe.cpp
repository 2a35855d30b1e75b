#include "predict/recall_probe.h"

#include <algorithm>
#include <utility>

namespace sluice {

namespace {

constexpr size_t kBlockInput = RecallProbe::kDistancesMax;  // its place among the views
constexpr size_t kLastToken = RecallProbe::kDistancesMax + 1;

}  // namespace

RecallProbe::RecallProbe(std::shared_ptr<const LensSet> lenses) : lenses_(std::move(lenses)) {
  if (!lenses_->layers().empty()) layers_.resize(lenses_->layers().back() + 1);
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    auto& counts = layers_[layer].counts;
    for (size_t view = 0; view < counts.size(); ++view) {
      counts[view].layer = layer;
      counts[view].distance = view < kDistancesMax ? static_cast<uint32_t>(view) + 1 : 1;
      counts[view].view = view < kDistancesMax  ? PredictionView::kBeforeAttention
                          : view == kBlockInput ? PredictionView::kBlockInput
                                                : PredictionView::kLastToken;
    }
    counts[kLastToken].distance = 0;
  }
}

void RecallProbe::predict(const RouterLens& lens, const float* rows, size_t n_row, const RouterLens* undo,
                          Prediction& prediction) {
  const uint32_t wanted = std::min(2 * lens.top_k(), lens.n_expert());
  prediction.n_row = n_row;
  prediction.count = wanted;
  prediction.experts.assign(n_row * wanted, UINT32_MAX);
  for (size_t row = 0; row < n_row; ++row) {
    std::span<const float> values(rows + row * lens.n_embd(), lens.n_embd());
    if (undo != nullptr) {
      undo->undo_norm(values, row_);
      values = row_;
    }
    lens.rank(values, wanted, scratch_, ranked_);
    for (size_t i = 0; i < ranked_.size(); ++i) prediction.experts[row * wanted + i] = ranked_[i].expert;
  }
}

void RecallProbe::see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd) {
  for (uint32_t distance = 1; distance <= kDistancesMax; ++distance) {
    const auto target = lenses_->layer_above(layer, distance);
    if (!target) return;
    const RouterLens* lens = lenses_->find(*target);
    if (lens == nullptr || lens->n_embd() != n_embd) continue;
    predict(*lens, rows, n_row, nullptr, layers_[*target].pending[distance - 1]);
  }
}

void RecallProbe::compare(RecallCounts& counts, std::span<const uint32_t> predicted, std::span<const int32_t> chosen) {
  const size_t top_k = chosen.size();
  counts.wanted += top_k;
  for (const int32_t id : chosen) {
    const auto at = std::find(predicted.begin(), predicted.end(), static_cast<uint32_t>(id));
    if (at == predicted.end()) continue;
    const auto place = static_cast<size_t>(at - predicted.begin());
    counts.found_at_1x += place < top_k;
    counts.found_at_1_5x += place < top_k + top_k / 2;
    counts.found_at_2x += place < 2 * top_k;
  }
}

void RecallProbe::see_block(uint32_t layer, const float* rows, size_t n_row, size_t n_embd,
                            std::span<const int32_t> ids, uint32_t top_k) {
  if (layer >= layers_.size()) return;
  Layer& self = layers_[layer];
  for (size_t view = 0; view < kViews; ++view) {
    Prediction& prediction = self.pending[view];
    if (prediction.n_row == n_row) {
      for (size_t row = 0; row < n_row; ++row) {
        compare(self.counts[view], std::span(prediction.experts).subspan(row * prediction.count, prediction.count),
                ids.subspan(row * top_k, top_k));
      }
    }
    prediction.n_row = 0;
  }
  for (size_t row = 0; row < n_row; ++row) {
    const auto chosen = ids.subspan(row * top_k, top_k);
    if (!self.recent.empty()) compare(self.counts[kLastToken], self.recent, chosen);
    // Its choices go to the front, in the router's order.
    std::vector<uint32_t> recent(chosen.begin(), chosen.end());
    for (const uint32_t expert : self.recent) {
      if (recent.size() >= 2 * size_t{top_k}) break;
      if (std::find(recent.begin(), recent.end(), expert) == recent.end()) recent.push_back(expert);
    }
    self.recent = std::move(recent);
  }
  const auto above = lenses_->layer_above(layer, 1);
  const RouterLens* own = lenses_->find(layer);
  if (rows == nullptr || !above || own == nullptr || own->n_embd() != n_embd) return;
  const RouterLens* lens = lenses_->find(*above);
  if (lens == nullptr || lens->n_embd() != n_embd) return;
  predict(*lens, rows, n_row, own, layers_[*above].pending[kBlockInput]);
}

std::vector<RecallCounts> RecallProbe::counts() const {
  std::vector<RecallCounts> all;
  for (const Layer& layer : layers_) {
    for (const RecallCounts& counts : layer.counts) {
      if (counts.wanted > 0) all.push_back(counts);
    }
  }
  return all;
}

}  // namespace sluice
