#include "cli/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/clock.h"

namespace sluice {

namespace {

std::atomic<int> g_signal{0};
std::atomic<int64_t> g_signal_ns{0};
int g_pipe[2] = {-1, -1};

static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "the handler may only touch lock-free atomics");

void on_signal(int signal_number) {
  const int saved_errno = errno;
  int none = 0;
  if (!g_signal.compare_exchange_strong(none, signal_number)) _exit(exit_code_of(signal_number));
  g_signal_ns.store(now_ns());
  const char byte = 0;
  // The pipe does not block; when it is full it is readable, which is all that is wanted.
  [[maybe_unused]] const ssize_t written = write(g_pipe[1], &byte, 1);
  errno = saved_errno;
}

}  // namespace

void install_stop_signals() {
  // Without the pipe (no descriptor left) a signal still stops all that asks stop_signal(); poll() ignores a -1.
  if (pipe(g_pipe) != 0) g_pipe[0] = g_pipe[1] = -1;
  for (int fd : g_pipe) {
    if (fd < 0) continue;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // reads of the model go on; whoever must wake up polls stop_fd()
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int stop_signal() {
  return g_signal.load();
}

double stop_seconds() {
  // Between the two stores of the handler the time is still unset; that reads as "just now".
  const int64_t at = g_signal_ns.load();
  return stop_requested() && at != 0 ? seconds_of(now_ns() - at) : 0.0;
}

void forget_interrupt() {
  if (stop_signal() != SIGINT) return;
  char bytes[16];
  while (read(g_pipe[0], bytes, sizeof(bytes)) > 0) {
  }
  g_signal_ns.store(0);
  int interrupt = SIGINT;
  g_signal.compare_exchange_strong(interrupt, 0);
}

int stop_fd() {
  return g_pipe[0];
}

}  // namespace sluice
