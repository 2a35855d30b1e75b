// `sluice run`: one prompt or a chat with a model, streamed.
//
// Exit     0; 1 when the model cannot be loaded or run; 2 for contradicting settings; 130 and 143 after a signal.
// Output   standard output carries the answers only; all else is standard error.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

void add_run_command(CLI::App& app, int& exit_code);

}  // namespace sluice
