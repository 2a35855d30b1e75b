// `sluice inspect`: what a model is made of, as sluice sees it, from its headers alone.
//
// Exit     0, for a dense model too; 1 when the model cannot be opened.
// Output   standard output carries the text or the JSON, standard error the rest.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

void add_inspect_command(CLI::App& app, int& exit_code);

}  // namespace sluice
