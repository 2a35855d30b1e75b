// Sizes in bytes: alignment, checked arithmetic on numbers that come from files, and their text forms.
// Byte counts and file offsets are uint64_t throughout the project.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace sluice {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

// `align` is a power of two.
constexpr uint64_t align_down(uint64_t value, uint64_t align) { return value & ~(align - 1); }
constexpr uint64_t align_up(uint64_t value, uint64_t align) { return align_down(value + align - 1, align); }
constexpr bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Empty on overflow.
std::optional<uint64_t> checked_add(uint64_t a, uint64_t b);
std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b);

// "512", "64KiB", "1.5GiB", "2G" (= GiB), "3GB" (= 10^9): a number and an optional unit, nothing else.
// kBadArgument names `what` and the text.
Result<uint64_t> parse_bytes(std::string_view text, std::string_view what);

// What a user writes for a budget: "auto", a size as above, or a share of the experts' bytes ("25%", up to 100).
struct BudgetSpec {
  enum class Kind { kAuto, kBytes, kPercent };
  Kind kind = Kind::kAuto;
  uint64_t bytes = 0;    // kBytes
  double percent = 0.0;  // kPercent, 0 < percent <= 100
};
Result<BudgetSpec> parse_budget(std::string_view text);

// "512 B", "9.67 MiB": three digits, binary units.
std::string format_bytes(uint64_t bytes);

}  // namespace sluice
