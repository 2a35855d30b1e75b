// Measures predictions without using them: every view of the model that a prefetcher could have is put through the
// target layer's lens, and what the router then chose is compared with it.
//
// Views    before attention   the output of the layer 1, 2 or 3 layers with experts below the target
//          block input        the input of the block below the target, its norm undone: what a plugin can see
//          last token         no lens: the experts that the layer used last, latest first; what a prediction must beat
// Recall   at k: of the experts that a token's router chose, how many are among the k best of the prediction. k is the
//          model's top-k, one and a half of it, and twice.
// Order    see_output of a layer, see_block of the next; layers rise within a pass. A batch whose rows do not agree
// with
//          the prediction's (llama.cpp drops rows in its last layer) is left out.
// Units    layers are the model's numbers; counts are (token, choice) pairs.
// Threads  thread-compatible.
// Cost     a lens for each token, layer and view: for measuring, not for every day.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "predict/lens_set.h"
#include "trace/engine_stats.h"

namespace sluice {

class RecallProbe {
 public:
  static constexpr uint32_t kDistancesMax = 3;

  explicit RecallProbe(std::shared_ptr<const LensSet> lenses);

  // Rows [n_row][n_embd] of the residual stream that leave `layer`.
  void see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd);
  // The input rows of a layer's block, and the experts that its router chose for them, [n_row][top_k]. `rows` may be
  // null where the input was not to be had.
  void see_block(uint32_t layer, const float* rows, size_t n_row, size_t n_embd, std::span<const int32_t> ids,
                 uint32_t top_k);

  // Rows that never saw a prediction are left out.
  std::vector<RecallCounts> counts() const;

 private:
  static constexpr size_t kViews = kDistancesMax + 1;  // those with a lens: distances, block input

  struct Prediction {
    size_t n_row = 0;
    uint32_t count = 0;             // of each row
    std::vector<uint32_t> experts;  // [n_row][count], best first
  };
  struct Layer {
    std::array<Prediction, kViews> pending;
    std::vector<uint32_t> recent;  // experts, latest first
    std::array<RecallCounts, kViews + 1> counts;
  };

  void predict(const RouterLens& lens, const float* rows, size_t n_row, const RouterLens* undo, Prediction& prediction);
  static void compare(RecallCounts& counts, std::span<const uint32_t> predicted, std::span<const int32_t> chosen);

  std::shared_ptr<const LensSet> lenses_;
  std::vector<Layer> layers_;  // by layer number
  RouterLens::Scratch scratch_;
  std::vector<ExpertScore> ranked_;
  std::vector<float> row_;
};

}  // namespace sluice
