// `sluice replay`: what each eviction policy would have made of a recorded run, at several pool sizes, without a model.
//
// Exit     0; 1 when the trace cannot be read; 2 for settings that do not fit it.
// Output   standard output carries the table or the JSON, standard error the rest.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

void add_replay_command(CLI::App& app, int& exit_code);

}  // namespace sluice
