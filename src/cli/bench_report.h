// What `sluice bench` found: plain figures, and their two forms, Markdown for people and JSON with everything. Measures
// and reads nothing.
//
// States   cold: the expert pool is empty and the file is not in the page cache. warm: the pool holds what a pass of
// the
//          same kind over another text left. In both, the model's own memory (KV cache, recurrent state) is empty.
// Figures  every repetition's own; of the repetitions the least, the median and the greatest (an even number's median
//          is the mean of the middle two).
// Keys     of the JSON: docs/benchmarks.md.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/report.h"
#include "cli/routing_use.h"

namespace sluice {

enum class BenchState { kCold, kWarm };
const char* bench_state_name(BenchState state);

struct BenchPhase {
  PhaseFigures figures;
  std::optional<double> joules;  // of the whole machine's processors
};

// One pass: a prompt, then tokens one by one.
struct BenchRepetition {
  BenchPhase prefill;
  BenchPhase decode;
  size_t text_window = 0;
  std::optional<double> cached_share;  // of the files, before the pass; empty when the system does not say
  uint64_t peak_rss_bytes = 0;         // since the model was opened
};

// All repetitions of one budget, length and state.
struct BenchRun {
  std::string budget;  // as it was asked for
  uint64_t budget_bytes = 0;
  uint64_t slots = 0;
  uint64_t pool_bytes = 0;
  std::string io_path;
  bool io_direct = false;
  uint32_t prompt_tokens = 0;
  uint32_t gen_tokens = 0;
  BenchState state = BenchState::kCold;
  std::vector<BenchRepetition> repetitions;

  // Cold means that the files were not in the page cache: false when a repetition could not get rid of them.
  bool file_cold() const;
};

struct BenchReport {
  std::string version;
  std::string commit;
  std::string processor;
  int threads = 0;
  int threads_batch = 0;
  uint32_t ubatch_tokens = 0;
  std::string policy;
  bool repack = false;
  bool energy_available = false;
  bool peak_is_since_open = false;  // else the peak is that of the whole program so far

  std::string model;
  std::string architecture;
  uint64_t expert_bytes = 0;
  uint64_t dense_bytes = 0;

  std::string text;
  bool text_random = false;
  RoutingUse routing;
  std::vector<BenchRun> runs;

  // What makes these figures say little about other work, one line each.
  std::vector<std::string> reservations() const;
};

struct Spread {
  double min = 0;
  double median = 0;
  double max = 0;
};
Spread spread_of(std::vector<double> values);  // of at least one

std::string format_bench(const BenchReport& report);
nlohmann::json bench_json(const BenchReport& report);

}  // namespace sluice
