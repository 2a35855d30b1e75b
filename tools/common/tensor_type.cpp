#include "common/tensor_type.h"

#include <algorithm>
#include <cctype>

namespace sluice::tools {
namespace {

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

bool is_writable_type(ggml_type type) {
  if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) return true;
  // The types that exist only as the other side of a dot product cannot be turned back into floats.
  return ggml_is_quantized(type) && ggml_get_type_traits(type)->to_float != nullptr;
}

}  // namespace

Result<ggml_type> parse_type(std::string_view name) {
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = static_cast<ggml_type>(i);
    const char* type_name = ggml_type_name(type);
    if (type_name != nullptr && is_writable_type(type) && equal_ignoring_case(name, type_name)) return type;
  }
  return make_error(ErrorCode::kBadArgument, "'{}' is no ggml type that can be written, such as q4_0, q6_K or bf16",
                    name);
}

}  // namespace sluice::tools
