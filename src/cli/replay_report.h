// What `sluice replay` computes and shows: policies at several pool sizes beside the bound that none can beat, and the
// speed that follows. Pure; reads no file.
//
// Speed    seconds per token = compute + read + wait, nothing overlapped:
//            compute  CostModel::compute_ms
//            read     bytes read per token / read_gbps
//            wait     layer calls with a miss per token x read_latency_us: the reads of a call run beside each other
//          A slow-side estimate: the engine computes resident experts while it reads the missing ones.
// Keys     of the JSON: trace{model, layers, experts, top_k, forwards, tokens, expert_bytes}, pools ("shared" or
//          "per layer"), runs[]{slots, share, policy, forwards, tokens, requests, hits, misses, hit_rate, evictions,
//          unplaced, bytes_read, misses_per_token, bytes_per_token, calls, calls_with_miss, tokens_per_second,
//          layers[]{layer, the counters}}. Figures that are not known are null; the bound is the policy "belady".
// Units    GB are 10^9 bytes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "policy/replay.h"

namespace sluice {

struct CostModel {
  double read_gbps = 0;  // 0: not given, then no speed is predicted
  double read_latency_us = 0;
  double compute_ms = 0;  // per token, with every expert resident
};

struct ReplaySettings {
  std::vector<uint32_t> slots;      // pool sizes, all layers together
  std::vector<BudgetSpec> budgets;  // more pool sizes: a share of all experts, or bytes
  std::vector<PolicyKind> policies;
  bool per_layer = false;     // a pool for each layer instead of shared ones
  uint64_t record_bytes = 0;  // one expert; 0: as the trace says
  uint64_t decay_interval = PolicyOptions{}.decay_interval;
  uint64_t half_life = PolicyOptions{}.half_life;
  uint64_t warm_forwards = 0;
  CostModel cost;
};

struct ReplayRun {
  uint32_t n_slot = 0;
  std::string policy;
  ReplayResult result;
};

struct ReplayReport {
  RoutingHeader header;
  std::vector<uint32_t> layers;  // those with records
  uint64_t n_expert = 0;         // of all these layers
  uint64_t expert_bytes = 0;     // 0: not known
  bool per_layer = false;
  uint64_t warm_forwards = 0;
  CostModel cost;
  std::vector<ReplayRun> runs;  // by pool size, then by policy; the bound last
};

// kBadArgument, with what was wanted: a pool size out of range, bytes where the size of an expert is not known.
Result<ReplayReport> make_replay_report(const RoutingTrace& trace, const ReplaySettings& settings);

// Empty when the read speed or the size of an expert is not known.
std::optional<double> predict_tokens_per_second(const ReplayResult& result, const CostModel& cost);

// Lines, each ending in a line break. `show_layers` adds a table of hit rates by layer.
std::string format_replay_report(const ReplayReport& report, bool show_layers);
nlohmann::json replay_report_json(const ReplayReport& report);

// "n_layer,top_k,n_expert" of a bare trace.
Result<RoutingHeader> parse_raw_shape(const std::string& text);
// "all" or names with commas between them.
Result<std::vector<PolicyKind>> parse_policies(const std::string& text);
// Pool sizes with commas between them: in slots, and as budgets.
Result<std::vector<uint32_t>> parse_slot_counts(const std::string& text);
Result<std::vector<BudgetSpec>> parse_budgets(const std::string& text);

}  // namespace sluice
