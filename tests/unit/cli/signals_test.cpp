#include "cli/signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "cli/line_reader.h"

namespace sluice {
namespace {

// Death tests: each runs in a process of its own, so that no signal is left over for the next.

TEST(SignalsDeathTest, FirstSignalOnlyAsksSecondEnds) {
  EXPECT_EXIT(
      {
        install_stop_signals();
        if (stop_requested()) _exit(1);
        std::raise(SIGINT);
        if (stop_signal() != SIGINT) _exit(2);
        std::raise(SIGINT);
        _exit(3);
      },
      testing::ExitedWithCode(130), "");
}

TEST(SignalsDeathTest, InterruptIsForgottenTerminationIsNot) {
  EXPECT_EXIT(
      {
        install_stop_signals();
        std::raise(SIGINT);
        forget_interrupt();
        if (stop_requested()) _exit(1);
        std::raise(SIGINT);  // answered before, so this is a first one again
        if (!stop_requested()) _exit(2);
        forget_interrupt();
        std::raise(SIGTERM);
        forget_interrupt();
        _exit(stop_requested() ? exit_code_of(stop_signal()) : 3);
      },
      testing::ExitedWithCode(143), "");
}

TEST(SignalsDeathTest, ASignalWakesTheReaderOfLines) {
  EXPECT_EXIT(
      {
        install_stop_signals();
        int ends[2];
        if (pipe(ends) != 0) _exit(1);
        std::raise(SIGINT);
        LineReader lines(ends[0]);  // nothing will ever be written
        _exit(lines.read().end == LineReader::End::kStopped ? 0 : 2);
      },
      testing::ExitedWithCode(0), "");
}

TEST(LineReader, CutsLinesAcrossReadsAndKeepsTheLastOne) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string text = "first\n\nthird without end";
  ASSERT_EQ(write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  close(ends[1]);
  LineReader lines(ends[0]);
  EXPECT_EQ(lines.read().text, "first");
  EXPECT_EQ(lines.read().text, "");
  const LineReader::Line third = lines.read();
  EXPECT_EQ(third.end, LineReader::End::kLine);
  EXPECT_EQ(third.text, "third without end");
  EXPECT_EQ(lines.read().end, LineReader::End::kFileEnd);
  close(ends[0]);
}

}  // namespace
}  // namespace sluice
