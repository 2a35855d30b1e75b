#include "base/result.h"

#include <system_error>

namespace sluice {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadArgument: return "bad argument";
    case ErrorCode::kBadFile: return "bad file";
    case ErrorCode::kNotFound: return "not found";
    case ErrorCode::kChanged: return "changed";
    case ErrorCode::kShortRead: return "short read";
    case ErrorCode::kDeviceError: return "device error";
    case ErrorCode::kNoMemory: return "no memory";
    case ErrorCode::kNoSlot: return "no slot";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::string Error::message() const {
  if (system_error == 0) return text;
  return fmt::format("{}: {}", text, std::generic_category().message(system_error));
}

}  // namespace sluice
