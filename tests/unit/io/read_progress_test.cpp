#include "io/read_progress.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "io/device.h"

namespace sluice {
namespace {

ErrorCode code_of(const ReadProgress& progress) {
  return progress.outcome("f", 0).status.error().code;
}

TEST(ReadProgress, WholePieceEndsTheRead) {
  ReadProgress progress(8192, 8192, 4096);
  EXPECT_EQ(progress.next_piece().bytes, 8192u);
  progress.take(8192);
  ASSERT_TRUE(progress.finished());
  EXPECT_TRUE(progress.outcome("f", 0).status.ok());
  EXPECT_EQ(progress.outcome("f", 0).bytes, 8192u);
}

TEST(ReadProgress, ShortReadIsContinuedWhereItStopped) {
  ReadProgress progress(100, 100, 1);
  progress.take(30);
  ASSERT_FALSE(progress.finished());
  EXPECT_EQ(progress.next_piece().start, 30u);
  EXPECT_EQ(progress.next_piece().bytes, 70u);
  progress.take(70);
  EXPECT_TRUE(progress.finished());
}

TEST(ReadProgress, DirectReadIsContinuedFromTheStartOfItsBlock) {
  ReadProgress progress(16384, 16384, 4096);
  progress.take(5000);
  EXPECT_EQ(progress.next_piece().start, 4096u);
  EXPECT_EQ(progress.next_piece().bytes, 12288u);
  progress.take(12288);
  ASSERT_TRUE(progress.finished());
  EXPECT_EQ(progress.outcome("f", 0).bytes, 16384u);
}

TEST(ReadProgress, LastBlockMayReachPastTheEnd) {
  ReadProgress progress(8192, 5000, 4096);
  progress.take(5000);
  ASSERT_TRUE(progress.finished());
  EXPECT_TRUE(progress.outcome("f", 0).status.ok());
}

TEST(ReadProgress, NoNewByteIsTheEndOfTheFile) {
  ReadProgress buffered(100, 100, 1);
  buffered.take(60);
  buffered.take(0);
  ASSERT_TRUE(buffered.finished());
  EXPECT_EQ(code_of(buffered), ErrorCode::kShortRead);

  // The direct continuation brings the part of the block that was there already.
  ReadProgress direct(8192, 8192, 4096);
  direct.take(5000);
  direct.take(5000 - 4096);
  ASSERT_TRUE(direct.finished());
  const Error error = direct.outcome("model.gguf", 12288).status.error();
  EXPECT_EQ(error.code, ErrorCode::kShortRead);
  EXPECT_EQ(error.text, "'model.gguf' ends early: wanted 8192 bytes at offset 12288, got 5000");
}

TEST(ReadProgress, PiecesAreBoundedAndAligned) {
  const uint64_t bytes = 2 * kGiB + 8192;
  ReadProgress progress(bytes, bytes - 1, 4096);
  progress.take(static_cast<int64_t>(progress.next_piece().bytes));
  EXPECT_EQ(progress.next_piece().start, kGiB);
  EXPECT_EQ(progress.next_piece().bytes, kGiB);
  progress.take(static_cast<int64_t>(kGiB));
  EXPECT_EQ(progress.next_piece().bytes, 8192u);
  ASSERT_FALSE(progress.finished());
  progress.take(8191);
  ASSERT_TRUE(progress.finished());
  EXPECT_TRUE(progress.outcome("f", 0).status.ok());
}

TEST(ReadProgress, FullPieceIsContinuedThoughWhatIsNeededIsThere) {
  ReadProgress progress(2 * kGiB, 10, 1);
  progress.take(static_cast<int64_t>(kGiB));
  EXPECT_FALSE(progress.finished());
}

TEST(ReadProgress, DeviceFaultIsRetriedABoundedNumberOfTimes) {
  ReadProgress recovers(10, 10, 1);
  for (int i = 0; i < Device::kRetriesMax; ++i) recovers.take(-EIO);
  ASSERT_FALSE(recovers.finished());
  recovers.take(10);
  EXPECT_TRUE(recovers.outcome("f", 0).status.ok());
  EXPECT_EQ(recovers.outcome("f", 0).retries, static_cast<uint64_t>(Device::kRetriesMax));

  ReadProgress stays_bad(10, 10, 1);
  for (int i = 0; i <= Device::kRetriesMax; ++i) {
    ASSERT_FALSE(stays_bad.finished());
    stays_bad.take(-EIO);
  }
  ASSERT_TRUE(stays_bad.finished());
  const Error error = stays_bad.outcome("model.gguf", 77).status.error();
  EXPECT_EQ(error.code, ErrorCode::kDeviceError);
  EXPECT_EQ(error.system_error, EIO);
  EXPECT_EQ(error.text, "cannot read 10 bytes at offset 77 of 'model.gguf'");
}

TEST(ReadProgress, InterruptionsAreRetriedButNotForever) {
  ReadProgress progress(10, 10, 1);
  for (int i = 0; i < ReadProgress::kInterruptionsMax; ++i) progress.take(i % 2 == 0 ? -EINTR : -EAGAIN);
  ASSERT_FALSE(progress.finished());
  progress.take(4);
  progress.take(-EAGAIN);
  ASSERT_FALSE(progress.finished()) << "a byte in between starts the count anew";
  for (int i = 0; i < ReadProgress::kInterruptionsMax; ++i) progress.take(-EAGAIN);
  ASSERT_TRUE(progress.finished());
  EXPECT_EQ(code_of(progress), ErrorCode::kDeviceError);
}

TEST(ReadProgress, OtherErrorsEndTheReadAtOnce) {
  ReadProgress progress(10, 10, 1);
  progress.take(-EBADF);
  ASSERT_TRUE(progress.finished());
  EXPECT_EQ(progress.outcome("f", 0).status.error().system_error, EBADF);
  EXPECT_EQ(progress.outcome("f", 0).retries, 0u);
}

}  // namespace
}  // namespace sluice
