#include "base/bytes.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Bytes, Alignment) {
  EXPECT_EQ(align_down(4097, 4096), 4096u);
  EXPECT_EQ(align_up(4097, 4096), 8192u);
  EXPECT_EQ(align_up(4096, 4096), 4096u);
  EXPECT_EQ(align_up(0, 512), 0u);
  EXPECT_TRUE(is_power_of_two(512));
  EXPECT_FALSE(is_power_of_two(0));
  EXPECT_FALSE(is_power_of_two(12));
}

TEST(Bytes, CheckedArithmetic) {
  EXPECT_EQ(checked_add(2, 3), 5u);
  EXPECT_FALSE(checked_add(UINT64_MAX, 1));
  EXPECT_EQ(checked_mul(uint64_t{1} << 32, uint64_t{1} << 31), uint64_t{1} << 63);
  EXPECT_FALSE(checked_mul(uint64_t{1} << 32, uint64_t{1} << 32));
}

TEST(Bytes, ParsesSizes) {
  EXPECT_EQ(*parse_bytes("512", "x"), 512u);
  EXPECT_EQ(*parse_bytes("64KiB", "x"), 64 * kKiB);
  EXPECT_EQ(*parse_bytes("64 kib", "x"), 64 * kKiB);
  EXPECT_EQ(*parse_bytes("1.5GiB", "x"), 3 * kGiB / 2);
  EXPECT_EQ(*parse_bytes("2G", "x"), 2 * kGiB);
  EXPECT_EQ(*parse_bytes("3GB", "x"), 3'000'000'000u);
}

TEST(Bytes, RefusesWhatIsNoSize) {
  for (const char* text : {"", "G", "-1", "1XB", "1 2", "nan", "inf", "1e3", "99999999999999GiB", "0x10"}) {
    const auto result = parse_bytes(text, "limit");
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_EQ(result.error().code, ErrorCode::kBadArgument);
    EXPECT_NE(result.error().message().find("limit"), std::string::npos);
    EXPECT_NE(result.error().message().find(text), std::string::npos);
  }
}

TEST(Bytes, ParsesBudgets) {
  EXPECT_EQ(parse_budget("auto")->kind, BudgetSpec::Kind::kAuto);
  EXPECT_EQ(parse_budget("25%")->percent, 25.0);
  EXPECT_EQ(parse_budget("0.5%")->percent, 0.5);
  EXPECT_EQ(parse_budget("100%")->kind, BudgetSpec::Kind::kPercent);
  EXPECT_EQ(parse_budget("900MiB")->bytes, 900 * kMiB);
  EXPECT_EQ(parse_budget("0")->bytes, 0u);
  for (const char* text : {"", "0%", "101%", "-5%", "%", "25 % of it", "automatic"}) {
    EXPECT_FALSE(parse_budget(text).ok()) << text;
  }
}

TEST(Bytes, Formats) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(10 * kMiB), "10.0 MiB");
  EXPECT_EQ(format_bytes(100 * kGiB), "100 GiB");
}

}  // namespace
}  // namespace sluice
