#include "base/result.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>

namespace sluice {
namespace {

TEST(Result, HoldsAValueOrAnError) {
  Result<std::unique_ptr<int>> good = std::make_unique<int>(7);
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(**good, 7);
  const std::unique_ptr<int> taken = std::move(good).value();
  EXPECT_EQ(*taken, 7);

  const Result<int> bad = make_system_error(ErrorCode::kDeviceError, EIO, "{} at {}", "read", 4096);
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().code, ErrorCode::kDeviceError);
  EXPECT_EQ(bad.error().message(), "read at 4096: Input/output error");
}

TEST(Result, StatusIsOkByDefault) {
  EXPECT_TRUE(Status().ok());
  const Status failed = make_error(ErrorCode::kNoSlot, "none left");
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().message(), "none left");
}

TEST(ResultDeathTest, MisuseAsserts) {
  const Result<int> bad = make_error(ErrorCode::kNotFound, "no such thing");
  EXPECT_DEATH((void)bad.value(), "no such thing");
  const Result<int> good = 1;
  EXPECT_DEATH((void)good.error(), "bug");
}

}  // namespace
}  // namespace sluice
