// EngineStats as JSON: the part of `sluice run --stats` that the engine knows, and all of what the plugin writes.
// Formats only; sums and rates are those of trace/engine_stats.h.
//
// Keys     streaming, model, budget_bytes, budget_bytes_min, expert_bytes, slots, experts{requests, hits, misses,
//          hit_rate, loads, evictions, unplaced, bytes_read}, io{path, direct, reads, bytes, seconds, retries, errors},
//          prefetch{}, time{route_sync_s, stall_s, staging_s, compute_s, scatter_s}, compute{fused_blocks,
//          generic_blocks, lone_blocks}, memory{pool_bytes}, layers[] (experts' keys and the
//          layer number; only layers that were asked for experts).
#pragma once

#include <nlohmann/json.hpp>

#include "trace/engine_stats.h"

namespace sluice {

nlohmann::json engine_stats_json(const EngineStats& stats);

}  // namespace sluice
