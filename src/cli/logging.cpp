#include "cli/logging.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "ggml.h"
#include "llama.h"
#include "log.h"

namespace sluice {

namespace {

struct LlamaLog {
  std::mutex mutex;
  bool show_all = false;
  bool holding = false;
  std::string first_held;
  std::string partial;  // llama.cpp logs in pieces; a line ends with its line break
  ggml_log_level partial_level = GGML_LOG_LEVEL_NONE;
};

// Never destroyed: threads may still log while the process ends.
LlamaLog& llama_log() {
  static LlamaLog* instance = new LlamaLog;
  return *instance;
}

void show_llama_line(LlamaLog& log, ggml_log_level level, const std::string& line) {
  if (line.empty()) return;
  const bool is_error = level == GGML_LOG_LEVEL_ERROR;
  if (is_error && log.holding && log.first_held.empty()) log.first_held = line;
  if (log.show_all || (is_error && !log.holding)) std::fprintf(stderr, "llama.cpp: %s\n", line.c_str());
}

void on_llama_log(ggml_log_level level, const char* text, void*) {
  LlamaLog& log = llama_log();
  std::lock_guard lock(log.mutex);
  if (level != GGML_LOG_LEVEL_CONT) {
    show_llama_line(log, log.partial_level, log.partial);
    log.partial.clear();
    log.partial_level = level;
  }
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = rest.find('\n');
    log.partial += rest.substr(0, end);
    if (end == std::string_view::npos) break;
    show_llama_line(log, log.partial_level, log.partial);
    log.partial.clear();
    rest.remove_prefix(end + 1);
  }
}

}  // namespace

Result<LogLevel> parse_log_level(const std::string& text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return make_error(ErrorCode::kBadArgument, "log level: wanted debug, info, warning or error, given '{}'", text);
}

void install_logging(LogLevel level) {
  // The engine tells why a computation failed, for tools that cannot; here the command tells it too. Once is enough.
  set_log_sink([last = std::string()](LogLevel, const std::string& line) mutable {
    if (line != last) std::fprintf(stderr, "sluice: %s\n", line.c_str());
    last = line;
  });
  set_log_level(level);
  {
    std::lock_guard lock(llama_log().mutex);
    llama_log().show_all = level == LogLevel::kDebug;
  }
  llama_log_set(on_llama_log, nullptr);
  common_log_set_verbosity_thold(level == LogLevel::kDebug ? LOG_LEVEL_DEBUG : LOG_LEVEL_ERROR);
}

LlamaErrorHold::LlamaErrorHold() {
  std::lock_guard lock(llama_log().mutex);
  llama_log().holding = true;
  llama_log().first_held.clear();
}

LlamaErrorHold::~LlamaErrorHold() {
  std::lock_guard lock(llama_log().mutex);
  llama_log().holding = false;
}

std::string LlamaErrorHold::first() const {
  std::lock_guard lock(llama_log().mutex);
  return llama_log().first_held.empty() ? "no reason given" : llama_log().first_held;
}

bool colour_wanted(int fd) {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  if (no_colour && no_colour[0] != '\0') return false;
  if (terminal && std::string_view(terminal) == "dumb") return false;
  return isatty(fd) != 0;
}

}  // namespace sluice
