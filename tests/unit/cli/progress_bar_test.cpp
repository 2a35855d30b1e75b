#include "cli/progress_bar.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/bytes.h"

namespace sluice {
namespace {

TEST(ProgressLine, TellsShareSizesSpeedAndTimeLeft) {
  EXPECT_EQ(progress_line("packing", 0, 4 * kGiB, 0), "packing [--------------------]   0 %  0 B of 4.00 GiB");
  EXPECT_EQ(progress_line("packing", kGiB, 4 * kGiB, 2),
            "packing [#####---------------]  25 %  1.00 GiB of 4.00 GiB  512 MiB/s  6 s left");
  EXPECT_EQ(progress_line("verifying", 4 * kGiB, 4 * kGiB, 2),
            "verifying [####################] 100 %  4.00 GiB of 4.00 GiB  2.00 GiB/s  0 s left");
}

TEST(ProgressLine, TimesAreTold) {
  const auto left = [](double seconds_per_gib, uint64_t gib_left) {
    const std::string line = progress_line("p", kGiB, (gib_left + 1) * kGiB, seconds_per_gib);
    return line.substr(line.rfind("  ") + 2);
  };
  EXPECT_EQ(left(1, 59), "59 s left");
  EXPECT_EQ(left(1, 60), "1 min 00 s left");
  EXPECT_EQ(left(1, 3599), "59 min 59 s left");
  EXPECT_EQ(left(1, 3660), "1 h 01 min left");
}

TEST(ProgressLine, OddNumbersDoNoHarm) {
  EXPECT_EQ(progress_line("p", 0, 0, 1), "p [####################] 100 %  0 B of 0 B");
  EXPECT_NE(progress_line("p", 2 * kGiB, kGiB, 1).find("100 %"), std::string::npos) << "more than was announced";
  EXPECT_NE(progress_line("p", kGiB - 1, kGiB, 1).find(" 99 %"), std::string::npos) << "100 % only when all is done";
  EXPECT_NE(progress_line("p", 1, uint64_t{1} << 63, 1e6).find(" left"), std::string::npos);
}

// Standard error is a terminal (or a pipe) while it lives; all() is what came out there.
class StandardError {
 public:
  explicit StandardError(bool terminal) : saved_(dup(STDERR_FILENO)) {
    int ends[2] = {-1, -1};
    const int failed = terminal ? openpty(&ends[0], &ends[1], nullptr, nullptr, nullptr) : pipe(ends);
    EXPECT_EQ(failed, 0);
    read_end_ = ends[0];
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
  }
  ~StandardError() {
    dup2(saved_, STDERR_FILENO);
    close(saved_);
    close(read_end_);
  }
  StandardError(const StandardError&) = delete;

  std::string all() const {
    std::string text;
    pollfd wanted{.fd = read_end_, .events = POLLIN, .revents = 0};
    while (poll(&wanted, 1, 0) == 1 && (wanted.revents & POLLIN) != 0) {
      char buffer[4096];
      const ssize_t n = read(read_end_, buffer, sizeof(buffer));
      if (n <= 0) break;
      text.append(buffer, static_cast<size_t>(n));
    }
    return text;
  }

 private:
  int saved_;
  int read_end_ = -1;
};

std::string shown(bool terminal) {
  const StandardError standard_error(terminal);
  {
    ProgressBar bar;
    bar.show("packing", 0, kGiB);
    EXPECT_EQ(standard_error.all(), "") << "nothing in the first second";
    std::this_thread::sleep_for(std::chrono::milliseconds(1050));
    bar.show("packing", kGiB / 2, kGiB);
    bar.show("packing", kGiB / 2 + 1, kGiB);  // too soon to be drawn
    bar.show("reading back", 0, kGiB);        // a phase of its own, in its first second
  }
  return standard_error.all();
}

TEST(ProgressBar, DrawsOnATerminalAndClearsTheLine) {
  const std::string text = shown(true);
  EXPECT_TRUE(text.starts_with("\rpacking [##########----------]  50 %  512 MiB of 1.00 GiB  ")) << text;
  EXPECT_TRUE(text.ends_with(" left\x1b[K\r\x1b[K")) << text;
  EXPECT_EQ(text.find("reading back"), std::string::npos);
}

TEST(ProgressBar, SaysNothingElsewhere) {
  EXPECT_EQ(shown(false), "");
}

}  // namespace
}  // namespace sluice
