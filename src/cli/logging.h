// The program's lines on standard error: ours as "sluice: LINE", llama.cpp's own log hidden except for its errors,
// and shown whole at the debug level. Answers go to standard output and never pass through here.
//
// Threads  install_logging at start-up; the sinks are safe from any thread.
#pragma once

#include <string>

#include "base/log.h"
#include "base/result.h"

namespace sluice {

Result<LogLevel> parse_log_level(const std::string& text);  // "debug", "info", "warning", "error"

void install_logging(LogLevel level);

// While one lives, llama.cpp's errors are collected instead of shown: the call that failed tells them in its own line.
// Not nested.
class LlamaErrorHold {
 public:
  LlamaErrorHold();
  LlamaErrorHold(const LlamaErrorHold&) = delete;
  LlamaErrorHold& operator=(const LlamaErrorHold&) = delete;
  ~LlamaErrorHold();

  // The first error since construction, the one that names the cause; "no reason given" when there was none.
  std::string first() const;
};

// True for a stream that is a terminal where colours are welcome (no NO_COLOR, no dumb terminal).
bool colour_wanted(int fd);

}  // namespace sluice
