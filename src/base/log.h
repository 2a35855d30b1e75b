// Where the library's rare lines go: fallbacks, refusals, one-time warnings. Never called per token.
// The program and the plugin install their own sink; the default writes "sluice: LINE" to standard error.
//
// Threads  safe from any thread. set_log_sink is for start-up.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <string_view>

namespace sluice {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel level, const std::string& line)>;
void set_log_sink(LogSink sink);
// Lines below `level` are dropped. The start value is kInfo.
void set_log_level(LogLevel level);

void log_line(LogLevel level, const std::string& line);
// As log_line, but a text that was logged this way before is dropped.
void log_line_once(LogLevel level, const std::string& line);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warning_once(fmt::format_string<Args...> format, Args&&... args) {
  log_line_once(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sluice
