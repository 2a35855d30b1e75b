// The table of `sluice probe`: recall of each view of the model, layer by layer. Formats only.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "trace/engine_stats.h"

namespace sluice {

// A Markdown table: a row for each layer and one for the mean over the layers that a view can predict; three columns
// for each view, recall at k = top-k, one and a half of it, and twice. "-": that view sees nothing of the layer.
std::string format_recall(std::span<const RecallCounts> recall, uint32_t top_k);

}  // namespace sluice
