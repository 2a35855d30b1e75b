#include "base/assert.h"

#include <cstdio>
#include <cstdlib>

namespace sluice {

void assert_failed(const char* file, int line, const char* expression, const std::string& message) {
  std::fprintf(stderr, "sluice: bug: %s:%d: %s: %s\n", file, line, expression, message.c_str());
  std::abort();
}

}  // namespace sluice
