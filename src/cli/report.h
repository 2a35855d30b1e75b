// What a run tells about itself: the short report on standard error and the file of --stats. Formats figures; measures
// and reads nothing.
//
// Figures  prefill.tokens: prompt tokens that were decoded. decode.tokens: steps of one token; an answer of n tokens
//          takes n - 1, since the first comes from the prompt's logits. generated_tokens counts the answers' tokens.
// Keys     those of backend/stats_json.h and: model, architecture, threads, generated_tokens, startup_s,
//          prefill{tokens, seconds, tokens_per_second, bytes_read, hit_rate}, decode{the same},
//          memory{peak_rss_bytes, dense_bytes} beside pool_bytes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "trace/engine_stats.h"

namespace sluice {

struct PhaseFigures {
  uint64_t tokens = 0;
  double seconds = 0;
  ExpertCounters experts;
  double route_sync_s = 0;  // of seconds, as in EngineStats; what is left is attention, dense layers and the rest
  double stall_s = 0;
  double compute_s = 0;

  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0; }
  double other_s() const { return seconds - route_sync_s - stall_s - compute_s; }
  // Adds one pass over `count` tokens, with the engine's counters from before and after it.
  void add(uint64_t count, double pass_seconds, const EngineStats& before, const EngineStats& after);
};

struct RunReport {
  std::string model;
  std::string architecture;
  int threads = 0;
  PhaseFigures prefill;
  PhaseFigures decode;
  uint64_t generated_tokens = 0;
  double startup_s = 0;  // from the command's start until the first token could be decoded
  uint64_t peak_rss_bytes = 0;
  uint64_t dense_bytes = 0;
  EngineStats engine;
};

nlohmann::json run_stats_json(const RunReport& report);

// A few lines, each ending in a line break. `colour` adds terminal escapes.
std::string format_report(const RunReport& report, bool colour);

}  // namespace sluice
