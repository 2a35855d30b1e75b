// Assertions for our own bugs, with the values in the message. They stay on in release builds: each is a compare and a
// branch on a cold path. Never for file contents, devices or flags: those faults are values (base/result.h).
#pragma once

#include <fmt/format.h>

#include <string>

namespace sluice {

// Prints "sluice: bug: FILE:LINE: EXPRESSION: MESSAGE" and aborts.
[[noreturn]] void assert_failed(const char* file, int line, const char* expression, const std::string& message);

}  // namespace sluice

#define SLUICE_ASSERT(condition, ...)                                                              \
  do {                                                                                             \
    if (!(condition)) [[unlikely]] {                                                               \
      ::sluice::assert_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__));         \
    }                                                                                              \
  } while (false)
