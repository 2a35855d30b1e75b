#include "base/bytes.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

namespace sluice {

std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

namespace {

// The number at the front of `text`, which must be finite and not negative; `rest` becomes what follows it.
std::optional<double> leading_number(std::string_view text, std::string_view& rest) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (code != std::errc{} || !std::isfinite(value) || value < 0) return std::nullopt;
  rest = text.substr(static_cast<size_t>(end - text.data()));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  return value;
}

std::optional<double> unit_factor(std::string_view unit) {
  std::string lower(unit);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (lower.empty() || lower == "b") return 1.0;
  constexpr std::string_view kPrefixes = "kmgt";
  const size_t power = kPrefixes.find(lower[0]);
  if (power == std::string_view::npos) return std::nullopt;
  const std::string_view suffix = std::string_view(lower).substr(1);
  const double exponent = static_cast<double>(power + 1);
  if (suffix.empty() || suffix == "ib") return std::pow(1024.0, exponent);
  if (suffix == "b") return std::pow(1000.0, exponent);
  return std::nullopt;
}

}  // namespace

Result<uint64_t> parse_bytes(std::string_view text, std::string_view what) {
  std::string_view unit;
  const auto number = leading_number(text, unit);
  const auto factor = number ? unit_factor(unit) : std::nullopt;
  if (!number || !factor) {
    return make_error(ErrorCode::kBadArgument, "{}: wanted a size such as 900MiB, 1.5GiB or 2GB, given '{}'", what, text);
  }
  const double bytes = *number * *factor;
  if (bytes >= 9.2e18) return make_error(ErrorCode::kBadArgument, "{}: '{}' is more than 2^63 bytes", what, text);
  return static_cast<uint64_t>(bytes);
}

Result<BudgetSpec> parse_budget(std::string_view text) {
  if (text == "auto") return BudgetSpec{};
  if (!text.empty() && text.back() == '%') {
    std::string_view rest;
    const auto number = leading_number(text.substr(0, text.size() - 1), rest);
    if (!number || !rest.empty() || *number <= 0 || *number > 100) {
      return make_error(ErrorCode::kBadArgument, "budget: wanted a share above 0% and up to 100%, given '{}'", text);
    }
    return BudgetSpec{BudgetSpec::Kind::kPercent, 0, *number};
  }
  const auto bytes = parse_bytes(text, "budget");
  if (!bytes) {
    return make_error(ErrorCode::kBadArgument, "budget: wanted auto, a size (900MiB, 1.5GiB) or a share (25%), given '{}'", text);
  }
  return BudgetSpec{BudgetSpec::Kind::kBytes, *bytes, 0.0};
}

std::string format_bytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, decimals, kUnits[unit]);
}

}  // namespace sluice
