#include "cli/replay_report.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <set>

namespace sluice {

namespace {

constexpr const char* kBoundName = "belady";

double ratio(uint64_t a, uint64_t b) {
  return b == 0 ? 0.0 : static_cast<double>(a) / static_cast<double>(b);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// The whole text as a decimal number.
bool parse_count(const std::string& text, uint32_t& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  return code == std::errc{} && stop == end;
}

// The pool sizes that were asked for, in slots, rising.
Result<std::set<uint32_t>> pool_sizes(const ReplaySettings& settings, uint64_t n_expert, uint64_t expert_bytes) {
  std::set<uint32_t> sizes;
  for (const uint32_t slots : settings.slots) {
    if (slots == 0 || slots > n_expert) {
      return make_error(ErrorCode::kBadArgument, "slots: wanted 1 to {} (all experts of the trace), given {}", n_expert,
                        slots);
    }
    sizes.insert(slots);
  }
  for (const BudgetSpec& budget : settings.budgets) {
    double share = budget.percent / 100;
    if (budget.kind == BudgetSpec::Kind::kAuto) {
      return make_error(ErrorCode::kBadArgument, "budget: wanted a size or a share, given auto");
    }
    if (budget.kind == BudgetSpec::Kind::kBytes) {
      if (expert_bytes == 0) {
        return make_error(ErrorCode::kBadArgument,
                          "budget: {} is a size, but the trace does not say how large an expert is (--record-bytes)",
                          format_bytes(budget.bytes));
      }
      share = std::min(ratio(budget.bytes, expert_bytes), 1.0);
    }
    // The small term undoes the rounding of shares such as 10 %.
    const auto slots = static_cast<uint32_t>(std::floor(share * static_cast<double>(n_expert) + 1e-6));
    if (slots == 0) return make_error(ErrorCode::kBadArgument, "budget: less than one of {} experts", n_expert);
    sizes.insert(slots);
  }
  return sizes;
}

nlohmann::json counters_json(const ExpertCounters& counters, bool bytes_known) {
  return {{"requests", counters.requests},
          {"hits", counters.hits},
          {"misses", counters.misses},
          {"hit_rate", counters.hit_rate()},
          {"evictions", counters.evictions},
          {"unplaced", counters.unplaced},
          {"bytes_read", bytes_known ? nlohmann::json(counters.bytes_read) : nlohmann::json()}};
}

std::string percent(double share) {
  return fmt::format("{:.1f} %", share * 100);
}

}  // namespace

Result<ReplayReport> make_replay_report(const RoutingTrace& trace, const ReplaySettings& settings) {
  if (trace.records.empty()) return make_error(ErrorCode::kBadArgument, "the trace has no records");
  RoutingTrace copy;
  const RoutingTrace* used = &trace;
  if (settings.record_bytes > 0) {
    copy = trace;
    copy.header.record_bytes.assign(trace.header.n_layer, settings.record_bytes);
    used = &copy;
  }
  ReplayReport report{.header = used->header,
                      .layers = routed_layers(*used),
                      .per_layer = settings.per_layer,
                      .warm_forwards = settings.warm_forwards,
                      .cost = settings.cost,
                      .runs = {}};
  report.n_expert = report.layers.size() * uint64_t{report.header.n_expert};
  for (const uint32_t layer : report.layers) {
    const uint64_t bytes = report.header.record_bytes.empty() ? 0 : report.header.record_bytes[layer];
    const auto layer_bytes = checked_mul(bytes, report.header.n_expert);
    const auto sum = layer_bytes ? checked_add(report.expert_bytes, *layer_bytes) : std::nullopt;
    if (!sum) return make_error(ErrorCode::kBadArgument, "layer {}: experts of {} bytes", layer, bytes);
    report.expert_bytes = *sum;
  }
  const auto sizes = pool_sizes(settings, report.n_expert, report.expert_bytes);
  if (!sizes) return sizes.error();

  for (const uint32_t n_slot : *sizes) {
    ReplayOptions options{
        .pools = settings.per_layer ? pool_per_layer(*used, n_slot) : pool_per_record_size(*used, n_slot),
        .policy = {},
        .warm_forwards = settings.warm_forwards};
    options.policy.decay_interval = settings.decay_interval;
    options.policy.half_life = settings.half_life;
    for (const PolicyKind kind : settings.policies) {
      options.policy.kind = kind;
      auto result = replay(*used, options);
      if (!result) return result.error();
      report.runs.push_back({n_slot, policy_name(kind), std::move(*result)});
    }
    auto bound = replay_bound(*used, options);
    if (!bound) return bound.error();
    if (bound->tokens == 0) {
      return make_error(ErrorCode::kBadArgument, "warm: the trace has no more than {} forwards",
                        settings.warm_forwards);
    }
    report.runs.push_back({n_slot, kBoundName, std::move(*bound)});
  }
  return report;
}

std::optional<double> predict_tokens_per_second(const ReplayResult& result, const CostModel& cost) {
  const bool bytes_known = result.total.bytes_read > 0 || result.total.loads == 0;
  if (cost.read_gbps <= 0 || !bytes_known || result.tokens == 0) return std::nullopt;
  const double read_s = ratio(result.total.bytes_read, result.tokens) / (cost.read_gbps * 1e9);
  const double wait_s = ratio(result.calls_with_miss, result.tokens) * cost.read_latency_us * 1e-6;
  const double token_s = cost.compute_ms * 1e-3 + read_s + wait_s;
  if (token_s <= 0) return std::nullopt;
  return 1 / token_s;
}

std::string format_replay_report(const ReplayReport& report, bool show_layers) {
  std::string text;
  const auto out = std::back_inserter(text);
  const ReplayResult& any = report.runs.front().result;
  fmt::format_to(out, "trace   {}{} tokens in {} forwards, {} layers of {} experts, top {}{}\n",
                 report.header.model.empty() ? "" : report.header.model + ": ", any.tokens, any.forwards,
                 report.layers.size(), report.header.n_expert, report.header.top_k,
                 report.expert_bytes == 0 ? "" : ", " + format_bytes(report.expert_bytes) + " in all");
  fmt::format_to(out, "pool    {}, {}\n\n", report.per_layer ? "one for each layer" : "shared by all layers",
                 report.warm_forwards == 0 ? "empty at the start"
                                           : fmt::format("filled by {} forward{} before", report.warm_forwards,
                                                         report.warm_forwards == 1 ? "" : "s"));

  const bool speed = std::any_of(report.runs.begin(), report.runs.end(), [&](const ReplayRun& run) {
    return predict_tokens_per_second(run.result, report.cost).has_value();
  });
  fmt::format_to(out, "{:>7}  {:>7}  {:<7} {:>9} {:>13}", "slots", "share", "policy", "hit rate", "misses/token");
  if (report.expert_bytes > 0) fmt::format_to(out, " {:>12}", "read/token");
  if (speed) fmt::format_to(out, " {:>9}", "tokens/s");
  text += '\n';
  for (const ReplayRun& run : report.runs) {
    const ReplayResult& result = run.result;
    fmt::format_to(out, "{:>7}  {:>7}  {:<7} {:>9} {:>13.2f}", run.n_slot, percent(ratio(run.n_slot, report.n_expert)),
                   run.policy, percent(result.total.hit_rate()), ratio(result.total.misses, result.tokens));
    if (report.expert_bytes > 0) {
      fmt::format_to(out, " {:>12}", format_bytes(result.total.bytes_read / result.tokens));
    }
    if (const auto rate = predict_tokens_per_second(result, report.cost)) fmt::format_to(out, " {:>9.2f}", *rate);
    text += '\n';
    if (run.policy == kBoundName && &run != &report.runs.back()) text += '\n';
  }
  fmt::format_to(out, "\n{} knows the future: no policy has fewer misses.\n", kBoundName);
  if (speed) {
    fmt::format_to(
        out,
        "tokens/s = 1 / ({} ms compute + read per token / {} GB/s + layer calls with a miss per token x {} us), "
        "nothing overlapped.\n",
        report.cost.compute_ms, report.cost.read_gbps, report.cost.read_latency_us);
  }
  if (!show_layers) return text;

  text += "\nhit rate by layer\n";
  fmt::format_to(out, "{:>7}  {:<7}", "slots", "policy");
  for (const uint32_t layer : report.layers) fmt::format_to(out, " {:>6}", layer);
  text += '\n';
  for (const ReplayRun& run : report.runs) {
    fmt::format_to(out, "{:>7}  {:<7}", run.n_slot, run.policy);
    for (const uint32_t layer : report.layers) {
      fmt::format_to(out, " {:>6.1f}", run.result.layers[layer].hit_rate() * 100);
    }
    text += '\n';
  }
  return text;
}

nlohmann::json replay_report_json(const ReplayReport& report) {
  const bool bytes_known = report.expert_bytes > 0;
  nlohmann::json runs = nlohmann::json::array();
  for (const ReplayRun& run : report.runs) {
    const ReplayResult& result = run.result;
    nlohmann::json json = counters_json(result.total, bytes_known);
    json["slots"] = run.n_slot;
    json["share"] = ratio(run.n_slot, report.n_expert);
    json["policy"] = run.policy;
    json["forwards"] = result.forwards;
    json["tokens"] = result.tokens;
    json["calls"] = result.calls;
    json["calls_with_miss"] = result.calls_with_miss;
    json["misses_per_token"] = ratio(result.total.misses, result.tokens);
    json["bytes_per_token"] =
        bytes_known ? nlohmann::json(ratio(result.total.bytes_read, result.tokens)) : nlohmann::json();
    const auto rate = predict_tokens_per_second(result, report.cost);
    json["tokens_per_second"] = rate ? nlohmann::json(*rate) : nlohmann::json();
    json["layers"] = nlohmann::json::array();
    for (const uint32_t layer : report.layers) {
      nlohmann::json counters = counters_json(result.layers[layer], bytes_known);
      counters["layer"] = layer;
      json["layers"].push_back(std::move(counters));
    }
    runs.push_back(std::move(json));
  }
  const ReplayResult& any = report.runs.front().result;
  return {{"trace",
           {{"model", report.header.model},
            {"layers", report.layers.size()},
            {"experts", report.header.n_expert},
            {"top_k", report.header.top_k},
            {"forwards", any.forwards},
            {"tokens", any.tokens},
            {"expert_bytes", bytes_known ? nlohmann::json(report.expert_bytes) : nlohmann::json()}}},
          {"pools", report.per_layer ? "per layer" : "shared"},
          {"runs", std::move(runs)}};
}

Result<RoutingHeader> parse_raw_shape(const std::string& text) {
  RoutingHeader shape;
  uint32_t* const fields[] = {&shape.n_layer, &shape.top_k, &shape.n_expert};
  const std::vector<std::string> parts = split(text);
  bool good = parts.size() == std::size(fields);
  for (size_t i = 0; good && i < parts.size(); i++) good = parse_count(parts[i], *fields[i]);
  if (!good)
    return make_error(ErrorCode::kBadArgument, "raw: wanted LAYERS,TOP_K,EXPERTS such as 8,8,128, given '{}'", text);
  if (const Status status = check_routing_header(shape); !status) return status.error();
  return shape;
}

Result<std::vector<PolicyKind>> parse_policies(const std::string& text) {
  if (text == "all") return std::vector<PolicyKind>(std::begin(kPolicyKinds), std::end(kPolicyKinds));
  std::vector<PolicyKind> kinds;
  for (const std::string& part : split(text)) {
    const auto kind = parse_policy(part);
    if (!kind) return kind.error();
    if (std::find(kinds.begin(), kinds.end(), *kind) == kinds.end()) kinds.push_back(*kind);
  }
  return kinds;
}

Result<std::vector<uint32_t>> parse_slot_counts(const std::string& text) {
  std::vector<uint32_t> counts;
  for (const std::string& part : split(text)) {
    if (!parse_count(part, counts.emplace_back())) {
      return make_error(ErrorCode::kBadArgument, "slots: wanted numbers with commas between them, given '{}'", text);
    }
  }
  return counts;
}

Result<std::vector<BudgetSpec>> parse_budgets(const std::string& text) {
  std::vector<BudgetSpec> budgets;
  for (const std::string& part : split(text)) {
    const auto budget = parse_budget(part);
    if (!budget) return budget.error();
    budgets.push_back(*budget);
  }
  return budgets;
}

}  // namespace sluice
