// Ctrl-C and SIGTERM as a question the program asks at its own pace. The first signal only sets a flag; a second one,
// while the first is not yet answered, ends the process at once.
//
// Exit     exit_code_of(signal): 130 for Ctrl-C, 143 for SIGTERM.
// Threads  any thread may ask; one thread installs and forgets.
#pragma once

#include <csignal>

namespace sluice {

// Once, at start-up.
void install_stop_signals();

// SIGINT or SIGTERM once one has come, 0 before.
int stop_signal();
inline bool stop_requested() {
  return stop_signal() != 0;
}
// Seconds since the signal came; 0 when none has.
double stop_seconds();
// A chat has answered Ctrl-C by ending the answer. SIGTERM is never forgotten.
void forget_interrupt();

// Readable once a signal has come: for poll() beside a file descriptor that is being waited for.
int stop_fd();

inline int exit_code_of(int signal_number) {
  return 128 + signal_number;
}

}  // namespace sluice
