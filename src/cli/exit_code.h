// What the program's exit codes mean, but for those of signals (cli/signals.h). docs/settings.md tells users.
#pragma once

namespace sluice {

inline constexpr int kExitFailure = 1;  // one line on standard error says why
inline constexpr int kExitUsage = 2;    // the command line cannot be used

}  // namespace sluice
