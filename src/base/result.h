// A value or an Error: how every fault of the world (files, devices, memory, settings) travels.
// Not for our own bugs (base/assert.h), and no exception takes its place at a module's edge.
//
// Owns     the value or the error's text.
// Misuse   value() of an error, or error() of a value, asserts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/assert.h"

namespace sluice {

enum class ErrorCode {
  kBadArgument,   // a setting or a call's argument cannot be met; the text says what was wanted and given
  kBadFile,       // a file's contents contradict themselves or the format
  kNotFound,      // no such file, tensor or expert
  kChanged,       // a file is no longer the one that was opened
  kShortRead,     // the file ended before the wanted bytes
  kDeviceError,   // reading failed for good, after the bounded retries
  kNoMemory,      // memory that was asked for is not to be had, or a budget is too small
  kNoSlot,        // every slot is pinned or loading
  kUnsupported,   // this machine, kernel or build cannot do it
  kCancelled,     // the caller asked to stop
};

const char* error_code_name(ErrorCode code);

// One clear line: what was wanted and what was found. `system_error` is an errno, 0 where there is none.
struct Error {
  ErrorCode code = ErrorCode::kBadArgument;
  std::string text;
  int system_error = 0;

  // The text, with the meaning of system_error behind it. No line break, no trailing period.
  std::string message() const;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & { return require_value(); }
  const T& value() const& { return const_cast<Result*>(this)->require_value(); }
  T&& value() && { return std::move(require_value()); }
  T& operator*() & { return require_value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &require_value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const {
    SLUICE_ASSERT(!ok(), "error() of a Result that holds a value");
    return std::get<1>(state_);
  }

 private:
  T& require_value() {
    SLUICE_ASSERT(ok(), "value() of an error: {}", std::get<1>(state_).message());
    return std::get<0>(state_);
  }

  std::variant<T, Error> state_;
};

// Success, or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_; }
  explicit operator bool() const { return ok(); }
  const Error& error() const {
    SLUICE_ASSERT(!ok(), "error() of a Status that is ok");
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

template <typename... Args>
Error make_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, fmt::format(format, std::forward<Args>(args)...), 0};
}

template <typename... Args>
Error make_system_error(ErrorCode code, int system_error, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, fmt::format(format, std::forward<Args>(args)...), system_error};
}

}  // namespace sluice
