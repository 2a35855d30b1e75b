#include "cli/probe_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "base/log.h"
#include "cli/exit_code.h"
#include "cli/logging.h"
#include "cli/model_session.h"
#include "cli/probe_report.h"
#include "cli/signals.h"
#include "common.h"

namespace sluice {

namespace {

constexpr uint32_t kUbatchTokens = 512;

struct ProbeOptions {
  std::string model_path;
  std::string text_path;
  size_t tokens_max = 0;  // 0: the whole text
  uint32_t context_tokens = 1024;
  int threads = 0;
};

// The text goes through the model in windows of the context's length, many tokens at once: the rows between its layers
// are those of one token at a time.
Status probe(const ProbeOptions& options, const EngineOptions& engine) {
  const Result<std::string> text = [&]() -> Result<std::string> {
    std::FILE* file = std::fopen(options.text_path.c_str(), "rb");
    if (file == nullptr) return make_system_error(ErrorCode::kNotFound, errno, "cannot open '{}'", options.text_path);
    std::string all;
    char bytes[1 << 16];
    while (const size_t got = std::fread(bytes, 1, sizeof(bytes), file)) all.append(bytes, got);
    std::fclose(file);
    return all;
  }();
  if (!text) return text.error();

  const auto opened = ModelSession::open({
      .model_path = options.model_path,
      .engine = engine,
      .context_tokens = options.context_tokens,
      .batch_tokens = kUbatchTokens,
      .ubatch_tokens = kUbatchTokens,
      .threads = options.threads,
      .all_outputs = true,
  });
  if (!opened) return opened.error();
  ModelSession& session = **opened;
  if (!session.streaming()) {
    return make_error(ErrorCode::kUnsupported, "'{}' has no experts to predict", options.model_path);
  }
  std::vector<llama_token> tokens = common_tokenize(session.vocab(), *text, true, true);
  if (options.tokens_max > 0) tokens.resize(std::min(tokens.size(), options.tokens_max));
  if (tokens.empty()) return make_error(ErrorCode::kBadArgument, "'{}' is empty", options.text_path);

  const bool show_progress = isatty(STDERR_FILENO);
  size_t in_window = 0;
  for (size_t done = 0; done < tokens.size();) {
    if (stop_requested()) return make_error(ErrorCode::kCancelled, "stopped");
    if (in_window == session.context_tokens()) {
      llama_memory_clear(llama_get_memory(session.context()), true);
      in_window = 0;
    }
    const size_t count = std::min<size_t>({kUbatchTokens, tokens.size() - done, session.context_tokens() - in_window});
    if (Status decoded = session.decode(tokens.data() + done, count); !decoded) return decoded;
    done += count;
    in_window += count;
    if (show_progress) fmt::print(stderr, "\r{} of {} tokens", done, tokens.size());
  }
  if (show_progress) fmt::print(stderr, "\r\x1b[K");
  const EngineStats stats = engine_stats();
  if (stats.recall.empty()) {
    return make_error(ErrorCode::kUnsupported, "'{}': nothing can be predicted (see --verbose)", options.model_path);
  }
  fmt::print("{} tokens of {}\n\n{}", tokens.size(), options.text_path,
             format_recall(stats.recall, session.catalog().n_expert_used));
  return {};
}

int run_probe(const ProbeOptions& options, bool verbose) {
  install_logging(verbose ? LogLevel::kInfo : LogLevel::kWarning);
  const auto fail = [](const Error& error, int exit_code) {
    if (error.code == ErrorCode::kCancelled && stop_requested()) return exit_code_of(stop_signal());
    log_error("{}", error.message());
    return exit_code;
  };
  Result<EngineOptions> engine = engine_options_from_environment();
  if (!engine) return fail(engine.error(), kExitUsage);
  engine->prefetch = PrefetchMode::kProbe;
  install_stop_signals();
  if (Status done = probe(options, *engine); !done) return fail(done.error(), kExitFailure);
  return 0;
}

}  // namespace

void add_probe_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("probe", "Measure how well the next layers' experts can be predicted on a text");
  const auto options = std::make_shared<ProbeOptions>();
  const auto verbose = std::make_shared<bool>(false);
  command->add_option("-m,--model", options->model_path, "GGUF file; any part of a split model")
      ->required()
      ->type_name("FILE");
  command->add_option("-f,--file", options->text_path, "the text")->required()->type_name("FILE");
  command->add_option("-n,--tokens-max", options->tokens_max, "only the first N tokens (default: all)")->type_name("N");
  command->add_option("-c,--ctx", options->context_tokens, "tokens of a window, which starts anew (default 1024)")
      ->check(CLI::Range(uint32_t{1}, uint32_t{1} << 24).description(""))
      ->type_name("N");
  command->add_option("-t,--threads", options->threads, "computing threads (default: the usable CPUs)")
      ->check(CLI::Range(1, 512).description(""))
      ->type_name("N");
  command->add_flag("-v,--verbose", *verbose, "tell what is missing");
  command->footer(
      "Writes a Markdown table: recall at one, one and a half and two times the model's top-k, for the residual "
      "stream\n"
      "before the attention of 1, 2 or 3 layers ahead, the input of the block below, and the experts used last.");
  command->callback([options, verbose, &exit_code] { exit_code = run_probe(*options, *verbose); });
}

}  // namespace sluice
