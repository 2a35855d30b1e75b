#include "cli/bench_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/engine.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/bench_report.h"
#include "cli/bench_text.h"
#include "cli/exit_code.h"
#include "cli/logging.h"
#include "cli/machine_facts.h"
#include "cli/model_session.h"
#include "cli/output_file.h"
#include "cli/signals.h"
#include "io/system_memory.h"
#include "sluice_version.h"

namespace sluice {

namespace {

struct BenchOptions {
  std::string model_path;
  std::vector<uint32_t> prompt_tokens = {128, 512};
  std::vector<uint32_t> gen_tokens = {64};
  std::vector<std::string> budgets;  // empty: the environment's
  uint32_t repetitions = 3;
  std::string text_path;
  std::string json_path;
  int threads = 0;
  int threads_batch = 0;
  uint32_t batch_tokens = 2048;
  uint32_t ubatch_tokens = 512;
  bool repack = false;
  std::optional<IoPath> io;
  std::optional<DirectMode> direct;
  std::optional<PolicyKind> policy;
};

// One budget and one pair of lengths: its cold and its warm run.
struct Case {
  std::string budget_text;
  BudgetSpec budget;
  uint32_t prompt_tokens = 0;
  uint32_t gen_tokens = 0;

  size_t window_tokens() const { return size_t{prompt_tokens} + gen_tokens; }
};

class Bench {
 public:
  Bench(const BenchOptions& options, const EngineOptions& engine) : options_(options), engine_(engine) {}

  Status run();
  const BenchReport& report() const { return report_; }

 private:
  Status plan();
  Status run_case(const Case& the_case);
  Status run_repetition(const Case& the_case, size_t index, BenchRun& cold, BenchRun& warm);
  Status pass(ModelSession& session, const Case& the_case, size_t window, BenchRepetition& repetition);
  Status decode(ModelSession& session, std::span<const llama_token> tokens, size_t tokens_per_call, BenchPhase& phase);
  Result<std::unique_ptr<ModelSession>> open(const Case& the_case);
  void describe(const ModelSession& session);
  void show_progress(const Case& the_case, size_t repetition, BenchState state);

  // Cold and warm passes see the same texts, a warm one never the text of the pass before it.
  size_t window_count() const { return std::max<size_t>(options_.repetitions, 2); }

  const BenchOptions& options_;
  const EngineOptions& engine_;
  std::vector<Case> cases_;
  std::optional<BenchText> text_;
  EnergyMeter energy_;
  std::vector<std::vector<uint64_t>> choices_;  // of all passes
  size_t passes_done_ = 0;
  BenchReport report_;
};

Status Bench::plan() {
  std::vector<std::string> budgets = options_.budgets;
  if (budgets.empty()) budgets.emplace_back();
  for (const std::string& text : budgets) {
    BudgetSpec budget = engine_.budget;
    std::string shown = text;
    if (!text.empty()) {
      const Result<BudgetSpec> parsed = parse_budget(text);
      if (!parsed) return parsed.error();
      budget = *parsed;
    } else {
      switch (budget.kind) {
        case BudgetSpec::Kind::kAuto: shown = "auto"; break;
        case BudgetSpec::Kind::kBytes: shown = format_bytes(budget.bytes); break;
        case BudgetSpec::Kind::kPercent: shown = fmt::format("{}%", budget.percent); break;
      }
    }
    for (const uint32_t prompt : options_.prompt_tokens) {
      for (const uint32_t gen : options_.gen_tokens) {
        cases_.push_back({.budget_text = shown, .budget = budget, .prompt_tokens = prompt, .gen_tokens = gen});
      }
    }
  }
  return {};
}

// A model loaded anew: its pool is empty.
Result<std::unique_ptr<ModelSession>> Bench::open(const Case& the_case) {
  EngineOptions engine = engine_;
  engine.budget = the_case.budget;
  return ModelSession::open({
      .model_path = options_.model_path,
      .engine = engine,
      .context_tokens = static_cast<uint32_t>(the_case.window_tokens()),
      .batch_tokens = options_.batch_tokens,
      .ubatch_tokens = options_.ubatch_tokens,
      .threads = options_.threads,
      .threads_batch = options_.threads_batch,
      .repack = options_.repack,
  });
}

void Bench::describe(const ModelSession& session) {
  const Catalog& catalog = session.catalog();
  report_.version = kSluiceVersion;
  report_.commit = kSluiceCommit;
  report_.processor = processor_name();
  report_.threads = session.threads();
  report_.threads_batch = options_.threads_batch > 0 ? options_.threads_batch : session.threads();
  report_.ubatch_tokens = options_.ubatch_tokens;
  report_.policy = policy_name(engine_.policy);
  report_.repack = options_.repack;
  report_.energy_available = energy_.available();
  report_.model = catalog.files.front()->path();
  report_.architecture = catalog.architecture;
  report_.expert_bytes = catalog.expert_bytes;
  report_.dense_bytes = catalog.dense_bytes;
  report_.text = text_->source();
  report_.text_random = text_->random();
}

void Bench::show_progress(const Case& the_case, size_t repetition, BenchState state) {
  if (!isatty(STDERR_FILENO)) return;
  fmt::print(stderr, "\rbench: pass {} of {}: budget {}, {} + {} tokens, {} {}\x1b[K", passes_done_ + 1,
             2 * options_.repetitions * cases_.size(), the_case.budget_text, the_case.prompt_tokens,
             the_case.gen_tokens, bench_state_name(state), repetition + 1);
  std::fflush(stderr);
}

// Decodes tokens as many at a time as are given, and measures it.
Status Bench::decode(ModelSession& session, std::span<const llama_token> tokens, size_t tokens_per_call,
                     BenchPhase& phase) {
  (void)energy_.joules_since_last();
  const EngineStats before = engine_stats();
  const int64_t start_ns = now_ns();
  for (size_t done = 0; done < tokens.size();) {
    if (stop_requested()) return make_error(ErrorCode::kCancelled, "stopped");
    const size_t count = std::min(tokens_per_call, tokens.size() - done);
    if (Status decoded = session.decode(tokens.data() + done, count); !decoded) return decoded;
    done += count;
  }
  llama_synchronize(session.context());
  const double seconds = seconds_of(now_ns() - start_ns);
  phase.figures.add(tokens.size(), seconds, before, engine_stats());
  phase.joules = energy_.joules_since_last();
  return {};
}

Status Bench::pass(ModelSession& session, const Case& the_case, size_t window, BenchRepetition& repetition) {
  repetition.text_window = window;
  double cached = 0;
  double bytes = 0;
  bool known = true;
  for (const auto& file : session.catalog().files) {
    const Result<double> share = cached_share(*file);
    known = known && share.ok();
    if (share) cached += *share * static_cast<double>(file->size_bytes());
    bytes += static_cast<double>(file->size_bytes());
  }
  if (known) repetition.cached_share = cached / bytes;

  llama_memory_clear(llama_get_memory(session.context()), true);
  const std::span<const llama_token> tokens = text_->window(window, the_case.window_tokens());
  const auto prompt = tokens.first(the_case.prompt_tokens);
  if (Status done = decode(session, prompt, session.batch_tokens(), repetition.prefill); !done) return done;
  // The text goes on: its own tokens, not the model's, so that every budget and every engine routes the same.
  if (Status done = decode(session, tokens.subspan(prompt.size()), 1, repetition.decode); !done) return done;
  repetition.peak_rss_bytes = peak_rss_bytes();
  ++passes_done_;
  return {};
}

Status Bench::run_repetition(const Case& the_case, size_t index, BenchRun& cold, BenchRun& warm) {
  report_.peak_is_since_open = reset_peak_rss();
  Result<std::unique_ptr<ModelSession>> opened = open(the_case);
  if (!opened) return opened.error();
  ModelSession& session = **opened;
  if (!session.streaming()) {
    return make_error(ErrorCode::kUnsupported, "'{}' has no experts to stream", options_.model_path);
  }
  if (!text_) {
    size_t tokens_max = 0;
    for (const Case& one : cases_) tokens_max = std::max(tokens_max, one.window_tokens());
    Result<BenchText> text =
        BenchText::load(options_.text_path, options_.model_path, session.vocab(), tokens_max * window_count());
    if (!text) return text.error();
    text_ = std::move(*text);
    describe(session);
  }

  // Loading has read the dense weights through the page cache; everything of the files is dropped again.
  for (const auto& file : session.catalog().files) drop_cache(*file);
  show_progress(the_case, index, BenchState::kCold);
  if (Status done = pass(session, the_case, index, cold.repetitions.emplace_back()); !done) return done;
  show_progress(the_case, index, BenchState::kWarm);
  const size_t other = (index + 1) % window_count();
  if (Status done = pass(session, the_case, other, warm.repetitions.emplace_back()); !done) return done;

  const EngineStats stats = engine_stats();
  for (BenchRun* run : {&cold, &warm}) {
    run->budget_bytes = stats.budget_bytes;
    run->slots = stats.slots;
    run->pool_bytes = stats.pool_bytes;
    run->io_path = stats.io_path;
    run->io_direct = stats.io_direct;
  }
  if (choices_.size() < stats.choices.size()) choices_.resize(stats.choices.size());
  for (size_t layer = 0; layer < stats.choices.size(); ++layer) {
    if (choices_[layer].size() < stats.choices[layer].size()) choices_[layer].resize(stats.choices[layer].size());
    std::ranges::transform(stats.choices[layer], choices_[layer], choices_[layer].begin(), std::plus());
  }
  return {};
}

Status Bench::run_case(const Case& the_case) {
  BenchRun cold = {.budget = the_case.budget_text,
                   .prompt_tokens = the_case.prompt_tokens,
                   .gen_tokens = the_case.gen_tokens,
                   .state = BenchState::kCold};
  BenchRun warm = cold;
  warm.state = BenchState::kWarm;
  for (size_t index = 0; index < options_.repetitions; ++index) {
    if (Status done = run_repetition(the_case, index, cold, warm); !done) return done;
  }
  report_.runs.push_back(std::move(cold));
  report_.runs.push_back(std::move(warm));
  return {};
}

Status Bench::run() {
  if (Status planned = plan(); !planned) return planned;
  Status done;
  for (const Case& the_case : cases_) {
    done = run_case(the_case);
    if (!done) break;
  }
  if (isatty(STDERR_FILENO)) fmt::print(stderr, "\r\x1b[K");
  report_.routing = measure_routing_use(choices_);
  return done;
}

int fail(const Error& error, int exit_code) {
  if (error.code == ErrorCode::kCancelled && stop_requested()) return exit_code_of(stop_signal());
  log_error("{}", error.message());
  return exit_code;
}

int run_bench(const BenchOptions& options) {
  install_logging(LogLevel::kWarning);
  Result<EngineOptions> engine = engine_options_from_environment();
  if (!engine) return fail(engine.error(), kExitUsage);
  if (options.io) engine->io.path = *options.io;
  if (options.direct) engine->direct = *options.direct;
  if (options.policy) engine->policy = *options.policy;
  engine->trace_path.clear();  // every repetition would write it anew
  std::optional<OutputFile> json;
  if (!options.json_path.empty()) {
    Result<OutputFile> created = OutputFile::create(options.json_path);
    if (!created) return fail(created.error(), kExitFailure);
    json.emplace(std::move(*created));
  }
  install_stop_signals();

  Bench bench(options, *engine);
  if (Status done = bench.run(); !done) return fail(done.error(), kExitFailure);
  fmt::print("{}", format_bench(bench.report()));
  if (json) {
    if (Status kept = json->write_and_commit(bench_json(bench.report()).dump(2) + "\n"); !kept) {
      return fail(kept.error(), kExitFailure);
    }
  }
  return 0;
}

// Checks a text by one of our parsers, whose Error becomes CLI11's.
template <typename Parse>
CLI::Validator parsed_by(Parse parse) {
  return {[parse](const std::string& text) {
            const auto parsed = parse(text);
            return parsed ? std::string() : parsed.error().message();
          },
          ""};
}

template <typename Target, typename Parse>
CLI::Option* add_parsed(CLI::App& command, const std::string& flag, Target& target, Parse parse,
                        const std::string& value_name, const std::string& description) {
  const std::function<void(const std::string&)> take = [&target, parse](const std::string& text) {
    auto parsed = parse(text);
    if (!parsed) throw CLI::ValidationError(parsed.error().message());
    target = *parsed;
  };
  return command.add_option_function<std::string>(flag, take, description)->type_name(value_name);
}

void add_options(CLI::App& command, BenchOptions& options) {
  const auto tokens = CLI::Range(1U, 1U << 24).description("");
  command.add_option("-m,--model", options.model_path, "GGUF file; any part of a split model")
      ->required()
      ->type_name("FILE");
  command.add_option("--prompt-tokens", options.prompt_tokens, "lengths of the prompt (default 128,512)")
      ->delimiter(',')
      ->check(tokens)
      ->type_name("N,...");
  command.add_option("--gen-tokens", options.gen_tokens, "tokens decoded one by one after it (default 64)")
      ->delimiter(',')
      ->check(tokens)
      ->type_name("N,...");
  command
      .add_option("--budgets", options.budgets, "memory for experts, as --budget of run (default: SLUICE_BUDGET, auto)")
      ->delimiter(',')
      ->check(parsed_by([](const std::string& text) { return parse_budget(text); }))
      ->type_name("BUDGET,...");
  command.add_option("-r,--repetitions", options.repetitions, "of each measurement (default 3)")
      ->check(CLI::Range(1U, 1000U).description(""))
      ->type_name("N");
  command
      .add_option("--text", options.text_path,
                  "the text to decode (default: heldout.txt beside the model, else random tokens)")
      ->type_name("FILE");
  command.add_option("--json", options.json_path, "write everything as JSON")->type_name("FILE");
  command.add_option("-t,--threads", options.threads, "computing threads (default: the usable CPUs)")
      ->check(CLI::Range(1, 512).description(""))
      ->type_name("N");
  command.add_option("--threads-batch", options.threads_batch, "threads for prompts (default: as -t)")
      ->check(CLI::Range(1, 512).description(""))
      ->type_name("N");
  command.add_option("-b,--batch", options.batch_tokens, "prompt tokens per call (default 2048)")
      ->check(tokens)
      ->type_name("N");
  command.add_option("--ubatch", options.ubatch_tokens, "prompt tokens computed at once (default 512)")
      ->check(tokens)
      ->type_name("N");
  command.add_flag("--repack", options.repack, "let ggml rearrange dense weights for speed");
  add_parsed(command, "--io", options.io, parse_io_path, "auto|io_uring|pread", "how experts are read");
  add_parsed(command, "--direct", options.direct, parse_direct_mode, "auto|on|off", "read past the page cache");
  add_parsed(command, "--policy", options.policy, parse_policy, "lru|lfu|lfru|s3fifo",
             "which expert gives up its slot");
  command.footer(
      "Example:\n"
      "  sluice bench -m model.gguf --text some.txt --budgets 10%,25%,50% -r 5 --json bench.json");
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Measure speed at several budgets and lengths, cold and warm");
  auto options = std::make_shared<BenchOptions>();
  add_options(*command, *options);
  command->callback([options, &exit_code] { exit_code = run_bench(*options); });
}

}  // namespace sluice
