#include "cli/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <utility>

#include "cli/signals.h"

namespace sluice {

LineReader::Line LineReader::read() {
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      Line line{End::kLine, buffer_.substr(0, end)};
      buffer_.erase(0, end + 1);
      return line;
    }

    pollfd waits[2] = {{.fd = fd_, .events = POLLIN, .revents = 0}, {.fd = stop_fd(), .events = POLLIN, .revents = 0}};
    const int ready = poll(waits, 2, -1);
    if (stop_requested()) return {End::kStopped, {}};
    if (ready < 0 && errno == EINTR) continue;

    char bytes[4096];
    const ssize_t got = ::read(fd_, bytes, sizeof(bytes));
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) {
      if (buffer_.empty()) return {End::kFileEnd, {}};
      return {End::kLine, std::exchange(buffer_, {})};
    }
    buffer_.append(bytes, static_cast<size_t>(got));
  }
}

}  // namespace sluice
