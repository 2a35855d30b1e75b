// `sluice probe`: how well the next layers' experts can be predicted on a text, layer by layer.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

void add_probe_command(CLI::App& app, int& exit_code);

}  // namespace sluice
