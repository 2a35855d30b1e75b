// Lines from a terminal or pipe, interruptible by the stop signals (cli/signals.h): what a chat waits in.
// Has no line editing of its own: the terminal's stands.
//
// Threads  thread-compatible.
#pragma once

#include <string>

namespace sluice {

class LineReader {
 public:
  enum class End {
    kLine,     // a whole line, without its line break; the last one may lack it in the file
    kFileEnd,  // nothing more to read
    kStopped,  // a stop signal came while waiting
  };
  struct Line {
    End end = End::kFileEnd;
    std::string text;
  };

  explicit LineReader(int fd) : fd_(fd) {}
  Line read();

 private:
  int fd_;
  std::string buffer_;  // read but not yet handed out
};

}  // namespace sluice
