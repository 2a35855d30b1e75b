#include "cli/bench_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"

namespace sluice {

namespace {

// Above this, a file that should be out of the page cache still is in it.
constexpr double kColdShareMax = 0.01;

using PhaseOf = BenchPhase BenchRepetition::*;
using FigureOf = std::function<double(const BenchPhase&)>;

Spread spread_over(const BenchRun& run, PhaseOf phase, const FigureOf& figure) {
  std::vector<double> values;
  for (const BenchRepetition& repetition : run.repetitions) values.push_back(figure(repetition.*phase));
  return spread_of(std::move(values));
}

double tokens_per_second(const BenchPhase& phase) {
  return phase.figures.tokens_per_second();
}
double hit_rate(const BenchPhase& phase) {
  return phase.figures.experts.hit_rate();
}
double bytes_read(const BenchPhase& phase) {
  return static_cast<double>(phase.figures.experts.bytes_read);
}
double evictions(const BenchPhase& phase) {
  return static_cast<double>(phase.figures.experts.evictions);
}
double bytes_per_token(const BenchPhase& phase) {
  return phase.figures.tokens == 0 ? 0 : bytes_read(phase) / static_cast<double>(phase.figures.tokens);
}
double stalled_share(const BenchPhase& phase) {
  return phase.figures.seconds > 0 ? phase.figures.stall_s / phase.figures.seconds : 0;
}

std::string rate_cell(const BenchRun& run, PhaseOf phase) {
  const Spread spread = spread_over(run, phase, tokens_per_second);
  return fmt::format("{:.1f} ({:.1f} - {:.1f})", spread.median, spread.min, spread.max);
}

std::string median_cell(const BenchRun& run, PhaseOf phase, const FigureOf& figure, const char* format, double factor) {
  const double median = spread_over(run, phase, figure).median * factor;
  return fmt::format(fmt::runtime(format), median);
}

std::string bytes_cell(const BenchRun& run, PhaseOf phase) {
  return format_bytes(static_cast<uint64_t>(spread_over(run, phase, bytes_per_token).median));
}

std::string joules_cell(const BenchRun& run) {
  std::vector<double> values;
  for (const BenchRepetition& repetition : run.repetitions) {
    if (!repetition.decode.joules || repetition.decode.figures.tokens == 0) return "not available";
    values.push_back(*repetition.decode.joules / static_cast<double>(repetition.decode.figures.tokens));
  }
  return fmt::format("{:.2f} J/token", spread_of(std::move(values)).median);
}

nlohmann::json spread_json(const Spread& spread) {
  return {{"min", spread.min}, {"median", spread.median}, {"max", spread.max}};
}

nlohmann::json phase_spreads_json(const BenchRun& run, PhaseOf phase) {
  return {
      {"tokens_per_second", spread_json(spread_over(run, phase, tokens_per_second))},
      {"hit_rate", spread_json(spread_over(run, phase, hit_rate))},
      {"bytes_read", spread_json(spread_over(run, phase, bytes_read))},
      {"evictions", spread_json(spread_over(run, phase, evictions))},
      {"stalled_share", spread_json(spread_over(run, phase, stalled_share))},
  };
}

nlohmann::json optional_json(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

nlohmann::json phase_json(const BenchPhase& phase) {
  const PhaseFigures& figures = phase.figures;
  return {
      {"tokens", figures.tokens},
      {"seconds", figures.seconds},
      {"tokens_per_second", figures.tokens_per_second()},
      {"requests", figures.experts.requests},
      {"hits", figures.experts.hits},
      {"misses", figures.experts.misses},
      {"hit_rate", figures.experts.hit_rate()},
      {"loads", figures.experts.loads},
      {"evictions", figures.experts.evictions},
      {"unplaced", figures.experts.unplaced},
      {"bytes_read", figures.experts.bytes_read},
      {"time",
       {{"route_sync_s", figures.route_sync_s},
        {"stall_s", figures.stall_s},
        {"compute_s", figures.compute_s},
        {"other_s", figures.other_s()}}},
      {"joules", optional_json(phase.joules)},
  };
}

nlohmann::json run_json(const BenchRun& run) {
  nlohmann::json repetitions = nlohmann::json::array();
  for (const BenchRepetition& repetition : run.repetitions) {
    repetitions.push_back({
        {"prefill", phase_json(repetition.prefill)},
        {"decode", phase_json(repetition.decode)},
        {"text_window", repetition.text_window},
        {"file_cached_share", optional_json(repetition.cached_share)},
        {"peak_rss_bytes", repetition.peak_rss_bytes},
    });
  }
  return {
      {"budget", run.budget},
      {"budget_bytes", run.budget_bytes},
      {"slots", run.slots},
      {"pool_bytes", run.pool_bytes},
      {"io", {{"path", run.io_path}, {"direct", run.io_direct}}},
      {"prompt_tokens", run.prompt_tokens},
      {"gen_tokens", run.gen_tokens},
      {"state", bench_state_name(run.state)},
      {"file_cold", run.file_cold()},
      {"prefill", phase_spreads_json(run, &BenchRepetition::prefill)},
      {"decode", phase_spreads_json(run, &BenchRepetition::decode)},
      {"repetitions", std::move(repetitions)},
  };
}

std::string run_row(const BenchRun& run) {
  constexpr PhaseOf kPrefill = &BenchRepetition::prefill;
  constexpr PhaseOf kDecode = &BenchRepetition::decode;
  uint64_t peak = 0;
  for (const BenchRepetition& repetition : run.repetitions) peak = std::max(peak, repetition.peak_rss_bytes);
  std::string state = bench_state_name(run.state);
  if (run.state == BenchState::kCold && !run.file_cold()) state += " pool, file cached";
  return fmt::format(
      "| {} ({}) | {} + {} | {} | {} | {} | {} / {} | {} / {} | {} / {} | {} / {} | {} | {} |\n", run.budget,
      format_bytes(run.budget_bytes), run.prompt_tokens, run.gen_tokens, state, rate_cell(run, kPrefill),
      rate_cell(run, kDecode), median_cell(run, kPrefill, hit_rate, "{:.1f}", 100),
      median_cell(run, kDecode, hit_rate, "{:.1f}", 100), bytes_cell(run, kPrefill), bytes_cell(run, kDecode),
      median_cell(run, kPrefill, evictions, "{:.0f}", 1), median_cell(run, kDecode, evictions, "{:.0f}", 1),
      median_cell(run, kPrefill, stalled_share, "{:.0f}", 100), median_cell(run, kDecode, stalled_share, "{:.0f}", 100),
      format_bytes(peak), joules_cell(run));
}

}  // namespace

const char* bench_state_name(BenchState state) {
  return state == BenchState::kCold ? "cold" : "warm";
}

bool BenchRun::file_cold() const {
  return state == BenchState::kCold && std::ranges::all_of(repetitions, [](const BenchRepetition& repetition) {
           return repetition.cached_share && *repetition.cached_share <= kColdShareMax;
         });
}

Spread spread_of(std::vector<double> values) {
  SLUICE_ASSERT(!values.empty(), "a spread of nothing");
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {.min = values.front(), .median = median, .max = values.back()};
}

std::vector<std::string> BenchReport::reservations() const {
  std::vector<std::string> lines;
  if (text_random) lines.emplace_back("random tokens: routing is not representative");
  if (routing.verdict == RoutingVerdict::kUniform) {
    lines.push_back(fmt::format(
        "uniform routing: not representative (the hottest quarter of the experts takes {:.1f} % of the choices, chance "
        "alone gives {:.1f} %)",
        100 * routing.hottest_quarter, 100 * routing.hottest_quarter_even));
  }
  if (routing.verdict == RoutingVerdict::kTooFewChoices) {
    lines.push_back(
        fmt::format("{} choices of experts are too few to tell whether the routing is uniform", routing.choices));
  }
  for (const BenchRun& run : runs) {
    if (run.state != BenchState::kCold || run.file_cold()) continue;
    lines.emplace_back(
        "the file could not be made cold: part of it stayed in the page cache, or the system does not say");
    break;
  }
  if (!runs.empty() && runs.front().repetitions.size() < 3) {
    lines.push_back(fmt::format("{} repetitions: the spread is not known", runs.front().repetitions.size()));
  }
  return lines;
}

std::string format_bench(const BenchReport& report) {
  std::string out = fmt::format("sluice {} ({}), {}, {} threads ({} for prompts), ubatch {}, policy {}{}\n",
                                report.version, report.commit, report.processor, report.threads, report.threads_batch,
                                report.ubatch_tokens, report.policy, report.repack ? ", repacked" : "");
  out += fmt::format("model {}: {}, experts {}, dense {}\n", report.model, report.architecture,
                     format_bytes(report.expert_bytes), format_bytes(report.dense_bytes));
  if (!report.runs.empty()) {
    const BenchRun& run = report.runs.front();
    out += fmt::format("read by {}, {}; text: {}; energy {}\n", run.io_path, run.io_direct ? "direct" : "buffered",
                       report.text, report.energy_available ? "by RAPL" : "not available");
  }
  for (const std::string& line : report.reservations()) out += fmt::format("NOTE: {}\n", line);
  out +=
      "\n| budget | tokens | state | prefill tokens/s | decode tokens/s | hits, % | read per token | evictions | "
      "stalled, "
      "% | peak memory | decode energy |\n|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const BenchRun& run : report.runs) out += run_row(run);
  out += "\nSpeeds: median (least - greatest). Pairs: prefill / decode, medians.\n";
  return out;
}

nlohmann::json bench_json(const BenchReport& report) {
  nlohmann::json runs = nlohmann::json::array();
  for (const BenchRun& run : report.runs) runs.push_back(run_json(run));
  return {
      {"program", {{"version", report.version}, {"commit", report.commit}}},
      {"machine",
       {{"processor", report.processor},
        {"threads", report.threads},
        {"threads_batch", report.threads_batch},
        {"energy", report.energy_available ? "rapl" : "not available"},
        {"peak_is_since_open", report.peak_is_since_open}}},
      {"model", report.model},
      {"architecture", report.architecture},
      {"expert_bytes", report.expert_bytes},
      {"dense_bytes", report.dense_bytes},
      {"ubatch_tokens", report.ubatch_tokens},
      {"policy", report.policy},
      {"repack", report.repack},
      {"text", {{"source", report.text}, {"random", report.text_random}}},
      {"routing",
       {{"choices", report.routing.choices},
        {"hottest_quarter", report.routing.hottest_quarter},
        {"hottest_quarter_even", report.routing.hottest_quarter_even},
        {"entropy", report.routing.entropy},
        {"verdict", routing_verdict_name(report.routing.verdict)}}},
      {"reservations", report.reservations()},
      {"runs", std::move(runs)},
  };
}

}  // namespace sluice
