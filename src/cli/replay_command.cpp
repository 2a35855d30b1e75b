#include "cli/replay_command.h"

#include <cerrno>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/exit_code.h"
#include "cli/replay_report.h"
#include "policy/replay.h"
#include "trace/routing_trace.h"

namespace sluice {

namespace {

struct ReplayCommand {
  std::string trace_path;
  RoutingHeader raw_shape;  // n_layer 0: the trace is in our own format
  bool salvage = false;
  bool show_layers = false;
  bool json = false;
  ReplaySettings settings;
};

// A flag whose text one of our parsers takes: its Error becomes CLI11's.
template <typename Parse, typename Take>
CLI::Option* add_parsed(CLI::App& command, const std::string& flag, Parse parse, Take take,
                        const std::string& description) {
  const std::function<void(const std::string&)> on_text = [flag, parse, take](const std::string& text) {
    auto parsed = parse(text);
    if (!parsed) throw CLI::ValidationError(flag, parsed.error().message());
    take(std::move(*parsed));
  };
  return command.add_option_function<std::string>(flag, on_text, description);
}

int run_replay(ReplayCommand command) {
  const auto fail = [](const Error& error, int exit_code) {
    fmt::print(stderr, "sluice replay: {}\n", error.message());
    return exit_code;
  };
  const auto trace =
      command.raw_shape.n_layer > 0
          ? read_raw_routing(command.trace_path, command.raw_shape)
          : read_routing_trace(command.trace_path, command.salvage ? TraceEnd::kSalvage : TraceEnd::kRequire);
  if (!trace) return fail(trace.error(), kExitFailure);

  ReplaySettings& settings = command.settings;
  if (settings.slots.empty() && settings.budgets.empty()) {
    for (const double percent : {10.0, 25.0, 50.0, 75.0}) {
      settings.budgets.push_back({BudgetSpec::Kind::kPercent, 0, percent});
    }
  }
  const auto report = make_replay_report(*trace, settings);
  if (!report) return fail(report.error(), kExitUsage);
  const std::string text =
      command.json ? replay_report_json(*report).dump(2) + "\n" : format_replay_report(*report, command.show_layers);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return fail(make_system_error(ErrorCode::kDeviceError, errno, "cannot write to standard output"), kExitFailure);
  }
  return 0;
}

}  // namespace

void add_replay_command(CLI::App& app, int& exit_code) {
  auto state = std::make_shared<ReplayCommand>();
  state->settings.policies.assign(std::begin(kPolicyKinds), std::end(kPolicyKinds));
  CLI::App* command = app.add_subcommand("replay", "choose a pool size and a policy by replaying a routing trace");
  command->footer(
      "Examples:\n"
      "  sluice replay chat.trace --budget 8GiB,16GiB --read-gbps 3.2 --compute-ms 60\n"
      "  sluice replay routing.u8 --raw 8,8,128 --budget 25% --per-layer --layers");
  command->add_option("trace", state->trace_path, "routing trace of a run")->required()->type_name("TRACE");

  const std::string input = "Trace";
  add_parsed(
      *command, "--raw", parse_raw_shape, [state](RoutingHeader shape) { state->raw_shape = shape; },
      "the file is bare bytes, one id each: [token][layer][top k]")
      ->type_name("LAYERS,TOP_K,EXPERTS")
      ->group(input);
  command->add_flag("--salvage", state->salvage, "use what a killed run left of its trace")->group(input);
  add_parsed(
      *command, "--record-bytes", [](const std::string& text) { return parse_bytes(text, "record-bytes"); },
      [state](uint64_t bytes) { state->settings.record_bytes = bytes; },
      "bytes of one expert (default: as the trace says)")
      ->type_name("SIZE")
      ->group(input);
  command
      ->add_option("--warm", state->settings.warm_forwards,
                   "forwards that fill the pool and are not counted (default 0)")
      ->type_name("N")
      ->group(input);

  const std::string pool = "Pool";
  add_parsed(
      *command, "--slots", parse_slot_counts,
      [state](std::vector<uint32_t> slots) { state->settings.slots = std::move(slots); },
      "pool sizes in experts, all layers together")
      ->type_name("N,...")
      ->group(pool);
  add_parsed(
      *command, "--budget", parse_budgets,
      [state](std::vector<BudgetSpec> budgets) { state->settings.budgets = std::move(budgets); },
      "pool sizes in bytes or as a share of all experts (default 10%,25%,50%,75%)")
      ->type_name("SIZE|PERCENT%,...")
      ->group(pool);
  command->add_flag("--per-layer", state->settings.per_layer, "split the slots evenly into a pool for each layer")
      ->group(pool);
  add_parsed(
      *command, "--policy", parse_policies,
      [state](std::vector<PolicyKind> kinds) { state->settings.policies = std::move(kinds); },
      "all, or some of lru,lfu,lfru,s3fifo (default all)")
      ->type_name("NAME,...")
      ->group(pool);
  command
      ->add_option("--decay-interval", state->settings.decay_interval,
                   fmt::format("lfu: forwards between two halvings (default {})", PolicyOptions{}.decay_interval))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40))
      ->type_name("N")
      ->group(pool);
  command
      ->add_option(
          "--half-life", state->settings.half_life,
          fmt::format("lfru: forwards after which an access counts half (default {})", PolicyOptions{}.half_life))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40))
      ->type_name("N")
      ->group(pool);

  const std::string speed = "Speed (predicted when --read-gbps and the experts' size are known)";
  command->add_option("--read-gbps", state->settings.cost.read_gbps, "the drive's random reads, 10^9 bytes a second")
      ->check(CLI::PositiveNumber)
      ->type_name("X")
      ->group(speed);
  command
      ->add_option("--read-latency-us", state->settings.cost.read_latency_us,
                   "waiting before the first byte (default 0)")
      ->check(CLI::NonNegativeNumber)
      ->type_name("Y")
      ->group(speed);
  command
      ->add_option("--compute-ms", state->settings.cost.compute_ms, "a token with every expert in memory (default 0)")
      ->check(CLI::NonNegativeNumber)
      ->type_name("Z")
      ->group(speed);

  const std::string output = "Output";
  command->add_flag("--layers", state->show_layers, "hit rates by layer too")->group(output);
  command->add_flag("--json", state->json, "JSON instead of tables")->group(output);
  command->callback([state, &exit_code] { exit_code = run_replay(*state); });
}

}  // namespace sluice
