// The ggml types that a tool can write, by name.
#pragma once

#include <ggml.h>

#include <string_view>

#include "base/result.h"

namespace sluice::tools {

// A type that ggml can write from floats: every quantised one except its internal dot-product types, and f32, f16,
// bf16. kBadArgument names what was given.
Result<ggml_type> parse_type(std::string_view name);

}  // namespace sluice::tools
