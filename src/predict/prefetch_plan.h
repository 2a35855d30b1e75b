// Which predictions are worth a read: how far to look ahead, how many experts of each layer and forward, from which
// score on, for which layers. Pure; knows no slots and no drive.
//
// Text     comma-separated, each at most once:
//            ahead=LO[/HI@CUTOFF]  distance, in layers with experts; HI from layer CUTOFF on (predict/look_ahead.h)
//            mult=X                the best top-k * X of each token, rounded up
//            min_score=X           only with at least that score (predict/router_lens.h)
//            layer_max=N           of one layer in one forward; 0: no limit
//            forward_max=N         of all layers in one forward; 0: no limit
//            layers=A-B:C          only these layers are predicted
// Errors   kBadArgument with the word that cannot be used.
// Forward  a new one begins where a layer's number is not above the last one's.
// Threads  thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "predict/look_ahead.h"
#include "predict/router_lens.h"

namespace sluice {

struct PrefetchPlan {
  LookAheadOptions ahead;
  double mult = 0.5;  // of the likelier half of top-k few are read in vain
  float min_score = 0;
  uint32_t layer_max = 0;
  uint32_t forward_max = 0;
  std::vector<std::pair<uint32_t, uint32_t>> layers;  // first and last of each range; empty: all

  bool allows(uint32_t layer) const;
};

Result<PrefetchPlan> parse_prefetch_plan(const std::string& text);

// Cuts predictions to the plan's limits.
class PrefetchBudget {
 public:
  explicit PrefetchBudget(const PrefetchPlan& plan) : plan_(plan) {}

  // How many of a row's best experts are asked for.
  uint32_t wanted(uint32_t top_k) const;
  // Predictions that were made at `source` for `target`, [row][best first], merged: the best of all rows first, then
  // the second, each expert once. Appends to `experts` what the limits leave.
  void take(uint32_t source, uint32_t target, std::span<const std::vector<ExpertScore>> rows,
            std::vector<uint32_t>& experts);

 private:
  PrefetchPlan plan_;
  uint32_t last_source_ = UINT32_MAX;
  uint32_t taken_in_forward_ = 0;
};

}  // namespace sluice
