// `sluice bench`: speed of prompt and generation at several budgets and lengths, each cold and warm, with what makes
// the figures mean something. How to read them: docs/benchmarks.md.
//
// Exit     as `sluice run`.
// Output   a Markdown table on standard output; progress, on a terminal, on standard error.
#pragma once

#include <CLI/CLI.hpp>

namespace sluice {

void add_bench_command(CLI::App& app, int& exit_code);

}  // namespace sluice
