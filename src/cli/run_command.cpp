#include "cli/run_command.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/engine.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/chat_template.h"
#include "cli/exit_code.h"
#include "cli/generator.h"
#include "cli/line_reader.h"
#include "cli/logging.h"
#include "cli/model_session.h"
#include "cli/output_file.h"
#include "cli/report.h"
#include "cli/run_options.h"
#include "cli/signals.h"
#include "io/system_memory.h"

namespace sluice {

namespace {

// Prompts of more tokens than this show how far they are, on a terminal.
constexpr size_t kProgressTokensMin = 1024;

Result<std::string> read_all(std::FILE* file, const std::string& name) {
  std::string text;
  char bytes[1 << 16];
  while (const size_t got = std::fread(bytes, 1, sizeof(bytes), file)) text.append(bytes, got);
  if (std::ferror(file)) return make_system_error(ErrorCode::kBadArgument, errno, "cannot read '{}'", name);
  // The line break that ends a text file is not part of the prompt.
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

// The one prompt of this run; empty when it is to be a chat.
Result<std::optional<std::string>> single_prompt(const RunOptions& options) {
  if (options.prompt) return options.prompt;
  if (!options.prompt_file.empty()) {
    std::FILE* file = std::fopen(options.prompt_file.c_str(), "rb");
    if (!file) return make_system_error(ErrorCode::kNotFound, errno, "cannot open '{}'", options.prompt_file);
    Result<std::string> text = read_all(file, options.prompt_file);
    std::fclose(file);
    if (!text) return text.error();
    return std::optional<std::string>(std::move(*text));
  }
  if (isatty(STDIN_FILENO)) return std::optional<std::string>();
  Result<std::string> text = read_all(stdin, "standard input");
  if (!text) return text.error();
  return std::optional<std::string>(std::move(*text));
}

// The files that were asked for. Opened before the model is loaded: a wrong path is told before the work, not after.
struct Outputs {
  std::optional<OutputFile> stats;
  std::optional<OutputFile> logits;
  std::optional<OutputFile> tokens;

  static Result<Outputs> open(const RunOptions& options) {
    Outputs outputs;
    for (auto [path, file] : {std::pair{&options.stats_path, &outputs.stats},
                              {&options.logits_path, &outputs.logits},
                              {&options.tokens_path, &outputs.tokens}}) {
      if (path->empty()) continue;
      Result<OutputFile> created = OutputFile::create(*path);
      if (!created) return created.error();
      file->emplace(std::move(*created));
    }
    return outputs;
  }
};

// One run, from the loaded model to its figures.
class Run {
 public:
  Run(const RunOptions& options, ModelSession& session, Generator& generator, std::optional<ChatTemplate> chat,
      Outputs& outputs)
      : options_(options), session_(session), generator_(generator), chat_(std::move(chat)), outputs_(outputs) {
    if (!options.system.empty()) messages_.push_back({"system", options.system});
  }

  Status one_prompt(const std::string& prompt);
  Status chat();
  RunReport report(double startup_s) const;

 private:
  Result<std::string> text_with(const std::string& user_text);
  Result<Answer> turn(const std::string& text, const Generator::LogitsCallback& on_logits);

  const RunOptions& options_;
  ModelSession& session_;
  Generator& generator_;
  std::optional<ChatTemplate> chat_;  // empty: plain continuation
  Outputs& outputs_;
  std::vector<ChatMessage> messages_;
  std::string plain_text_;                  // without a template: all that was said so far
  std::vector<llama_token> prompt_tokens_;  // what the last answer follows
  PhaseFigures prefill_;
  PhaseFigures decode_;
  uint64_t generated_tokens_ = 0;
};

// The whole text the model is to continue after the user has said something.
Result<std::string> Run::text_with(const std::string& user_text) {
  if (!chat_) return plain_text_ + user_text;
  messages_.push_back({"user", user_text});
  return chat_->format(messages_);
}

// Decodes what is new in `text` and streams the answer to standard output.
Result<Answer> Run::turn(const std::string& text, const Generator::LogitsCallback& on_logits) {
  const bool show_progress = !options_.quiet && isatty(STDERR_FILENO);
  bool progress_shown = false;
  size_t prompt_tokens_done = 0;
  auto on_progress = [&](size_t done, size_t total) {
    prompt_tokens_done = done;
    if (!show_progress || total < kProgressTokensMin) return;
    std::fprintf(stderr, "\rprompt %zu of %zu tokens", done, total);
    progress_shown = true;
  };
  const EngineStats at_start = engine_stats();
  const int64_t start_ns = now_ns();
  const Status read = generator_.read(text, on_progress);
  const int64_t read_ns = now_ns();
  const EngineStats at_read = engine_stats();
  if (progress_shown) std::fprintf(stderr, "\r\x1b[K");
  prefill_.add(prompt_tokens_done, seconds_of(read_ns - start_ns), at_start, at_read);
  if (!read) return read.error();
  prompt_tokens_ = generator_.tokens();

  auto on_text = [](std::string_view piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  };
  Result<Answer> answer = generator_.answer(on_text, on_logits);
  const double answer_seconds = seconds_of(now_ns() - read_ns);
  std::fputc('\n', stdout);
  std::fflush(stdout);
  if (!answer) return answer;
  decode_.add(answer->steps, answer_seconds, at_read, engine_stats());
  generated_tokens_ += answer->tokens.size();
  if (answer->end == AnswerEnd::kContextFull) {
    log_warning("the context of {} tokens is full: -c makes it larger", session_.context_tokens());
  }
  return answer;
}

Status Run::one_prompt(const std::string& prompt) {
  Generator::LogitsCallback on_logits;
  if (outputs_.logits) {
    on_logits = [&](const float* logits, size_t n_vocab) {
      return outputs_.logits->write(logits, n_vocab * sizeof(float));
    };
  }

  const Result<std::string> text = text_with(prompt);
  if (!text) return text.error();
  const Result<Answer> answer = turn(*text, on_logits);
  if (!answer) return answer.error();

  if (outputs_.logits) {
    if (Status kept = outputs_.logits->commit(); !kept) return kept;
  }
  if (outputs_.tokens) {
    const nlohmann::json ids = {{"prompt", prompt_tokens_}, {"generated", answer->tokens}};
    return outputs_.tokens->write_and_commit(ids.dump() + "\n");
  }
  return {};
}

Status Run::chat() {
  const bool colour = colour_wanted(STDERR_FILENO);
  const char* prompt = colour ? "\x1b[1m> \x1b[0m" : "> ";
  if (!options_.quiet) std::fprintf(stderr, "Ctrl-C stops an answer, Ctrl-D ends the chat.\n");
  LineReader lines(STDIN_FILENO);
  for (;;) {
    std::fputs(prompt, stderr);
    const LineReader::Line line = lines.read();
    if (line.end != LineReader::End::kLine) {
      std::fputc('\n', stderr);
      return {};
    }
    if (line.text.empty()) continue;

    const size_t messages_before = messages_.size();
    const Result<std::string> text = text_with(line.text);
    Result<Answer> answer = text ? turn(*text, nullptr) : Result<Answer>(text.error());
    if (!answer) {
      // A turn that did not fit or was stopped before its answer began never happened; anything else ends the chat.
      messages_.resize(messages_before);
      const ErrorCode code = answer.error().code;
      if (code != ErrorCode::kCancelled && code != ErrorCode::kBadArgument) return answer.error();
      if (code == ErrorCode::kBadArgument) log_error("{}", answer.error().message());
    } else {
      messages_.push_back({"assistant", answer->text});
      plain_text_ = *text + answer->text;
    }
    forget_interrupt();
    if (stop_requested()) return {};
  }
}

RunReport Run::report(double startup_s) const {
  return {
      .model = session_.catalog().files.front()->path(),
      .architecture = session_.catalog().architecture,
      .threads = session_.threads(),
      .prefill = prefill_,
      .decode = decode_,
      .generated_tokens = generated_tokens_,
      .startup_s = startup_s,
      .peak_rss_bytes = peak_rss_bytes(),
      .dense_bytes = session_.catalog().dense_bytes,
      .engine = engine_stats(),
  };
}

int fail(const Error& error, int exit_code) {
  if (error.code == ErrorCode::kCancelled && stop_requested()) return exit_code_of(stop_signal());
  log_error("{}", error.message());
  return exit_code;
}

int run(const RunOptions& options) {
  const int64_t start_ns = now_ns();
  install_logging(options.quiet ? LogLevel::kError : options.log_level);

  const Result<EngineOptions> environment = engine_options_from_environment();
  if (!environment) return fail(environment.error(), kExitUsage);
  const Result<std::optional<std::string>> prompt = single_prompt(options);
  if (!prompt) return fail(prompt.error(), kExitFailure);
  if (Status checked = check_run_options(options, !prompt->has_value()); !checked) {
    return fail(checked.error(), kExitUsage);
  }
  const EngineOptions engine = engine_options_with_flags(*environment, options);
  if (Status checked = check_engine_options(engine); !checked) return fail(checked.error(), kExitUsage);
  Result<Outputs> outputs = Outputs::open(options);
  if (!outputs) return fail(outputs.error(), kExitFailure);
  install_stop_signals();

  const Result<std::unique_ptr<ModelSession>> session = ModelSession::open({
      .model_path = options.model_path,
      .engine = engine,
      .context_tokens = options.context_tokens,
      .batch_tokens = options.batch_tokens,
      .ubatch_tokens = options.ubatch_tokens,
      .threads = options.threads,
      .threads_batch = options.threads_batch,
      .repack = options.repack,
  });
  if (!session) return fail(session.error(), kExitFailure);
  const Result<std::unique_ptr<Generator>> generator =
      Generator::create(**session, {
                                       .tokens_max = options.tokens_max,
                                       .temperature = options.temperature,
                                       .top_k = options.top_k,
                                       .top_p = options.top_p,
                                       .min_p = options.min_p,
                                       .seed = options.seed,
                                       .ignore_eos = options.ignore_eos,
                                   });
  if (!generator) return fail(generator.error(), kExitFailure);

  std::optional<ChatTemplate> chat;
  if (!options.raw && ChatTemplate::model_has_one((*session)->model())) {
    Result<ChatTemplate> parsed = ChatTemplate::of((*session)->model());
    if (!parsed) return fail(parsed.error(), kExitFailure);
    chat.emplace(std::move(*parsed));
  } else if (!options.raw) {
    log_warning("the model has no chat template: it continues the text");
  }
  log_info("seed {}, context {} tokens, {} threads", (*generator)->seed(), (*session)->context_tokens(),
           (*session)->threads());

  Run the_run(options, **session, **generator, std::move(chat), *outputs);
  const double startup_s = seconds_of(now_ns() - start_ns);
  const Status done = prompt->has_value() ? the_run.one_prompt(**prompt) : the_run.chat();
  int exit_code = done ? 0 : fail(done.error(), kExitFailure);
  if (stop_requested()) exit_code = exit_code_of(stop_signal());

  // The report is told after a failure too, once there is something to tell: it shows how far the run came.
  const RunReport report = the_run.report(startup_s);
  if (!options.quiet && report.engine.experts.requests + report.prefill.tokens > 0) {
    std::fputs(format_report(report, colour_wanted(STDERR_FILENO)).c_str(), stderr);
  }
  if (outputs->stats) {
    const Status kept = outputs->stats->write_and_commit(run_stats_json(report).dump(2) + "\n");
    if (!kept) exit_code = fail(kept.error(), kExitFailure);
  }
  return exit_code;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "Answer a prompt, or chat");
  auto options = std::make_shared<RunOptions>();
  add_run_options(*command, *options);
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice
