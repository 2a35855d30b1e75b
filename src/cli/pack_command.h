// `sluice pack MODEL [OUT]` and `sluice verify PATH`: whole-file jobs on a model. Neither computes anything.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

// `exit_code` is set when the command has run.
void add_pack_command(CLI::App& app, int& exit_code);
void add_verify_command(CLI::App& app, int& exit_code);

}  // namespace sluice
