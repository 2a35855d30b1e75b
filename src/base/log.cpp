#include "base/log.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace sluice {

namespace {

struct LogState {
  std::mutex mutex;
  LogSink sink = [](LogLevel, const std::string& line) { std::fprintf(stderr, "sluice: %s\n", line.c_str()); };
  LogLevel level = LogLevel::kInfo;
  std::set<std::string> said_once;
};

// Never destroyed: threads and exit handlers may still log while the process ends.
LogState& state() {
  static LogState* instance = new LogState;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  std::lock_guard lock(state().mutex);
  state().sink = std::move(sink);
}

void set_log_level(LogLevel level) {
  std::lock_guard lock(state().mutex);
  state().level = level;
}

void log_line(LogLevel level, const std::string& line) {
  std::lock_guard lock(state().mutex);
  if (level >= state().level) state().sink(level, line);
}

void log_line_once(LogLevel level, const std::string& line) {
  {
    std::lock_guard lock(state().mutex);
    if (!state().said_once.insert(line).second) return;
  }
  log_line(level, line);
}

}  // namespace sluice
