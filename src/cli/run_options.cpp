#include "cli/run_options.h"

#include <charconv>
#include <functional>
#include <system_error>

#include "cli/logging.h"

namespace sluice {

namespace {

// CLI11's own range check, without its types and bounds in the help text.
template <typename Number>
CLI::Validator range(Number min, Number max) {
  return CLI::Range(min, max).description("");
}

Result<uint32_t> parse_ubatch(const std::string& text) {
  constexpr uint32_t kTokensMax = 1u << 20;
  if (text == "auto") return 0u;
  uint32_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (error == std::errc() && end == text.data() + text.size() && tokens > 0 && tokens <= kTokensMax) return tokens;
  return make_error(ErrorCode::kBadArgument, "wanted auto or 1 to {} tokens, given '{}'", kTokensMax, text);
}

// A flag whose text one of our parsers turns into a value: its Error becomes CLI11's.
template <typename Target, typename Parse>
CLI::Option* add_parsed(CLI::App& command, const std::string& flags, Target& target, Parse parse,
                        const std::string& value_name, const std::string& description) {
  std::function<void(const std::string&)> take = [&target, parse](const std::string& text) {
    auto parsed = parse(text);
    if (!parsed) throw CLI::ValidationError(parsed.error().message());
    target = *parsed;
  };
  return command.add_option_function<std::string>(flags, take, description)->type_name(value_name);
}

}  // namespace

void add_run_options(CLI::App& command, RunOptions& options) {
  const std::string model = "Model";
  command.add_option("-m,--model", options.model_path, "GGUF file; any part of a split model")
      ->required()
      ->type_name("FILE")
      ->group(model);
  command.add_option("-c,--ctx", options.context_tokens, "context in tokens (default: the model's own, at most 4096)")
      ->check(range(1u, 1u << 30))
      ->type_name("N")
      ->group(model);
  command.add_option("-t,--threads", options.threads, "computing threads (default: the usable CPUs)")
      ->check(range(1, 512))
      ->type_name("N")
      ->group(model);
  command.add_option("--threads-batch", options.threads_batch, "threads for prompts (default: as -t)")
      ->check(range(1, 512))
      ->type_name("N")
      ->group(model);
  command.add_option("-b,--batch", options.batch_tokens, "prompt tokens per call (default 2048)")
      ->check(range(1u, 1u << 20))
      ->type_name("N")
      ->group(model);
  add_parsed(command, "--ubatch", options.ubatch_tokens, parse_ubatch, "auto|N",
             "prompt tokens computed at once (auto: 512, or up to 2048 where memory does not hold all experts)")
      ->group(model);
  command
      .add_flag("--repack", options.repack, "let ggml rearrange dense weights for speed (always with a native pack); results differ in rounding")
      ->group(model);

  const std::string prompt = "Prompt (default: chat on a terminal, else standard input)";
  command.add_option("-p,--prompt", options.prompt, "the prompt")->type_name("TEXT")->group(prompt);
  command.add_option("-f,--file", options.prompt_file, "read the prompt from a file")->type_name("FILE")->group(prompt);
  command.add_option("--system", options.system, "system text of the chat")->type_name("TEXT")->group(prompt);
  command.add_flag("--raw", options.raw, "no chat template: the model continues the text")->group(prompt);
  command.add_option("-n,--tokens-max", options.tokens_max, "answer at most N tokens (default 256; -1: no limit)")
      ->check(range(-1, 1 << 30))
      ->type_name("N")
      ->group(prompt);
  command.add_flag("--ignore-eos", options.ignore_eos, "never end before -n tokens")->group(prompt);

  const std::string sampling = "Sampling";
  command.add_option("--temp", options.temperature, "temperature (default 0.8; 0: the likeliest token)")
      ->check(range(0.0f, 100.0f))
      ->type_name("X")
      ->group(sampling);
  command.add_option("--top-k", options.top_k, "only the K likeliest tokens (default 40; 0: all)")
      ->check(range(0, 1 << 30))
      ->type_name("K")
      ->group(sampling);
  command.add_option("--top-p", options.top_p, "only the likeliest tokens that sum to P (default 0.95; 1: all)")
      ->check(range(0.0f, 1.0f))
      ->type_name("P")
      ->group(sampling);
  command.add_option("--min-p", options.min_p, "only tokens of at least P times the best (default 0.05; 0: all)")
      ->check(range(0.0f, 1.0f))
      ->type_name("P")
      ->group(sampling);
  command.add_option("--seed", options.seed, "of the random numbers (default: a new one each time)")
      ->type_name("N")
      ->group(sampling);

  const std::string memory = "Memory and disk (defaults: SLUICE_BUDGET, SLUICE_IO, SLUICE_DIRECT, SLUICE_POLICY)";
  add_parsed(command, "--budget", options.budget, parse_budget, "auto|SIZE|PERCENT%",
             "memory for experts: what is free (auto), a size such as 8GiB, or a share of the experts")
      ->group(memory);
  add_parsed(command, "--io", options.io, parse_io_path, "auto|io_uring|pread|synthetic",
             "how experts are read; synthetic: not at all, to time the computation")
      ->group(memory);
  add_parsed(command, "--direct", options.direct, parse_direct_mode, "auto|on|off", "read past the page cache")
      ->group(memory);
  command
      .add_option("--mirror", options.mirrors,
                  "folder on another drive with a copy of the model: reads are shared out (repeatable)")
      ->type_name("DIR")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group(memory);
  add_parsed(command, "--policy", options.policy, parse_policy, "lru|lfu|lfru|s3fifo", "which expert gives up its slot")
      ->group(memory);
  add_parsed(command, "--fused", options.fused, parse_fused_mode, "auto|off|require",
             "how experts are computed: fused where that is known, by ggml's separate operations, or fused or not at all")
      ->group(memory);
  add_parsed(command, "--prefetch", options.prefetch, parse_prefetch_mode, "auto|on|off|probe",
             "read what the next layers will want ahead; probe only measures the predictions")
      ->group(memory);
  command.add_flag("--verify-reads", options.verify_reads, "compare what is read with the checksums of a pack")->group(memory);
  add_parsed(
      command, "--per-layer", options.per_layer, [](const std::string& text) { return parse_switch("per_layer", text); },
      "on|off", "give every layer slots of its own")
      ->group(memory);
  add_parsed(
      command, "--fit", options.fit, [](const std::string& text) { return parse_switch("fit", text); }, "on|off",
      "make a budget smaller that memory cannot hold, and follow what is left")
      ->group(memory);
  command
      .add_flag("--verify-slots", options.verify_slots, "compare experts in memory with the file while running (slow)")
      ->group(memory);

  const std::string output = "Output";
  command.add_option("--stats", options.stats_path, "write the figures as JSON")->type_name("FILE")->group(output);
  command.add_option("--logits", options.logits_path, "write the float32 logits that each token was chosen from")
      ->type_name("FILE")
      ->group(output);
  command.add_option("--tokens", options.tokens_path, "write the ids of prompt and answer as JSON")
      ->type_name("FILE")
      ->group(output);
  command.add_option("--trace", options.trace_path, "write the router's choices, for `sluice replay`")
      ->type_name("FILE")
      ->group(output);
  add_parsed(command, "--log-level", options.log_level, parse_log_level, "debug|info|warning|error",
             "what is told on standard error (default warning)")
      ->group(output);
  command
      .add_flag_callback(
          "-v,--verbose", [&options] { options.log_level = LogLevel::kInfo; }, "as --log-level info")
      ->group(output);
  command.add_flag("-q,--quiet", options.quiet, "only the answer and errors")->group(output);

  command.footer(
      "Examples:\n"
      "  sluice run -m model.gguf                            chat\n"
      "  sluice run -m model.gguf -p 'Why is the sky blue?' --budget 8GiB\n"
      "  sluice run -m model.gguf --raw -n 64 < text.txt     continue a text\n"
      "  sluice run -m model.gguf -p Hi --stats stats.json   keep the figures");
}

Status check_run_options(const RunOptions& options, bool chatting) {
  if (options.prompt && !options.prompt_file.empty()) {
    return make_error(ErrorCode::kBadArgument, "-p and -f both give a prompt");
  }
  if (options.raw && !options.system.empty()) {
    return make_error(ErrorCode::kBadArgument, "--system needs the chat template, which --raw turns off");
  }
  if (options.quiet && options.log_level < LogLevel::kWarning) {
    return make_error(ErrorCode::kBadArgument, "-q hides what --log-level or -v asks for");
  }
  if (options.ignore_eos && options.tokens_max < 0) {
    return make_error(ErrorCode::kBadArgument, "--ignore-eos needs a limit: -n N");
  }
  if (chatting && !(options.logits_path.empty() && options.tokens_path.empty())) {
    return make_error(ErrorCode::kBadArgument, "--logits and --tokens need one prompt: -p, -f or standard input");
  }
  return {};
}

EngineOptions engine_options_with_flags(const EngineOptions& environment, const RunOptions& options) {
  EngineOptions engine = environment;
  if (options.budget) engine.budget = *options.budget;
  if (options.io) engine.io.path = *options.io;
  if (options.direct) engine.direct = *options.direct;
  if (!options.mirrors.empty()) engine.mirrors = options.mirrors;
  if (options.policy) engine.policy = *options.policy;
  if (options.per_layer) engine.per_layer = *options.per_layer;
  if (options.fused) engine.fused = *options.fused;
  if (options.prefetch) engine.prefetch = *options.prefetch;
  if (options.verify_reads) engine.verify_reads = true;
  if (options.fit) engine.fit = *options.fit;
  if (options.verify_slots) engine.verify_slots = true;
  if (!options.trace_path.empty()) engine.trace_path = options.trace_path;
  return engine;
}

}  // namespace sluice
