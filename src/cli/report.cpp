#include "cli/report.h"

#include <fmt/format.h>

#include "backend/stats_json.h"
#include "base/bytes.h"

namespace sluice {

namespace {

ExpertCounters difference(const ExpertCounters& after, const ExpertCounters& before) {
  return {
      .requests = after.requests - before.requests,
      .hits = after.hits - before.hits,
      .misses = after.misses - before.misses,
      .loads = after.loads - before.loads,
      .evictions = after.evictions - before.evictions,
      .unplaced = after.unplaced - before.unplaced,
      .bytes_read = after.bytes_read - before.bytes_read,
  };
}

nlohmann::json phase_json(const PhaseFigures& phase) {
  return {
      {"tokens", phase.tokens},
      {"seconds", phase.seconds},
      {"tokens_per_second", phase.tokens_per_second()},
      {"bytes_read", phase.experts.bytes_read},
      {"hit_rate", phase.experts.hit_rate()},
  };
}

std::string format_seconds(double seconds) {
  return fmt::format("{:.2f} s", seconds);
}

std::string format_phase(const PhaseFigures& phase) {
  return fmt::format("{} tokens in {}, {:.2f} tokens/s", phase.tokens, format_seconds(phase.seconds),
                     phase.tokens_per_second());
}

uint64_t bytes_per_token(const PhaseFigures& phase) {
  return phase.tokens == 0 ? 0 : phase.experts.bytes_read / phase.tokens;
}

}  // namespace

void PhaseFigures::add(uint64_t count, double pass_seconds, const EngineStats& before, const EngineStats& after) {
  tokens += count;
  seconds += pass_seconds;
  experts += difference(after.experts, before.experts);
  route_sync_s += after.route_sync_s - before.route_sync_s;
  stall_s += after.stall_s - before.stall_s;
  compute_s += after.compute_s - before.compute_s;
}

nlohmann::json run_stats_json(const RunReport& report) {
  nlohmann::json json = engine_stats_json(report.engine);
  json["model"] = report.model;
  json["architecture"] = report.architecture;
  json["threads"] = report.threads;
  json["generated_tokens"] = report.generated_tokens;
  json["startup_s"] = report.startup_s;
  json["prefill"] = phase_json(report.prefill);
  json["decode"] = phase_json(report.decode);
  json["memory"]["peak_rss_bytes"] = report.peak_rss_bytes;
  json["memory"]["dense_bytes"] = report.dense_bytes;
  return json;
}

std::string format_report(const RunReport& report, bool colour) {
  const EngineStats& engine = report.engine;
  std::string out;
  auto line = [&](const char* name, const std::string& text) {
    out += fmt::format("{}{:<9}{} {}\n", colour ? "\x1b[2m" : "", name, colour ? "\x1b[0m" : "", text);
  };
  line("prompt", format_phase(report.prefill));
  line("answer", format_phase(report.decode));
  if (engine.streaming) {
    line("experts", fmt::format("budget {} of {}, {} slots, pool {}", format_bytes(engine.budget_bytes),
                                format_bytes(engine.expert_bytes), engine.slots, format_bytes(engine.pool_bytes)));
    line("hits", fmt::format("{:.1f} % of {} requests (prompt {:.1f} %, answer {:.1f} %)",
                             100 * engine.experts.hit_rate(), engine.experts.requests,
                             100 * report.prefill.experts.hit_rate(), 100 * report.decode.experts.hit_rate()));
    line("read",
         fmt::format("{} by {}{}, per token {} (prompt) and {} (answer)", format_bytes(engine.io_bytes), engine.io_path,
                     engine.io_direct ? ", direct" : "", format_bytes(bytes_per_token(report.prefill)),
                     format_bytes(bytes_per_token(report.decode))));
    if (!engine.io_drives.empty()) {
      std::string drives;
      for (const DriveStats& drive : engine.io_drives) {
        drives += fmt::format("{}{} from {}{}", drives.empty() ? "" : ", ", format_bytes(drive.bytes), drive.path,
                              drive.dropped ? " (dropped)" : "");
      }
      line("drives", drives);
    }
    if (engine.prefetch.predicted > 0) {
      const PrefetchCounters& ahead = engine.prefetch;
      const uint64_t wasted = ahead.bytes > ahead.bytes_taken ? ahead.bytes - ahead.bytes_taken : 0;
      line("prefetch", fmt::format("{}: {} experts read ahead, {} used in time, {} late; {} of {} for nothing",
                                   engine.prefetch_mode, ahead.submitted, ahead.ready_on_time, ahead.not_ready,
                                   format_bytes(wasted), format_bytes(ahead.bytes)));
    }
    line("time", fmt::format("experts computed {}, scattered {}, stalled {}, staged {}, routed {}", format_seconds(engine.compute_s),
                             format_seconds(engine.scatter_s), format_seconds(engine.stall_s), format_seconds(engine.staging_s),
                             format_seconds(engine.route_sync_s)));
  }
  line("memory",
       fmt::format("peak {}, dense weights {}", format_bytes(report.peak_rss_bytes), format_bytes(report.dense_bytes)));
  line("start", format_seconds(report.startup_s));
  return out;
}

}  // namespace sluice
