// The sluice program: one subcommand per task, each added by its own file.
//
// Exit     0 done; 1 failed; 2 usage; 130 Ctrl-C; 143 SIGTERM.
#include <fmt/format.h>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "backend/engine.h"
#include "cli/bench_command.h"
#include "cli/exit_code.h"
#include "cli/inspect_command.h"
#include "cli/pack_command.h"
#include "cli/probe_command.h"
#include "cli/replay_command.h"
#include "cli/run_command.h"
#include "ggml.h"
#include "llama.h"
#include "sluice_version.h"

namespace {

std::string version_text() {
  sluice::engine_register_cpu_backend();  // whose features are told
  return fmt::format("sluice {} ({}; llama.cpp {}, ggml {})\n{}", sluice::kSluiceVersion, sluice::kSluiceCommit,
                     llama_version(), ggml_version(), llama_print_system_info());
}

// libgomp's threads spin for some 10 ms when a graph ends, and so through most waits for the drive. It reads how long when
// it is loaded, so the program starts itself again with a shorter time, once, unless the user chose one. 10000 turns are
// 0.4 ms: longer than any pause inside a graph.
void keep_waiting_threads_quiet(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (setenv("GOMP_SPINCOUNT", "10000", 0) != 0) return;
  execv("/proc/self/exe", argv);  // returns only where that is not to be had: then everything is as it was
}

// "run" in "sluice run --bogus": whose help would have told.
std::string command_path(const CLI::App& app) {
  const auto chosen = app.get_subcommands([](const CLI::App* command) { return command->parsed(); });
  return chosen.empty() ? app.get_name() : app.get_name() + " " + chosen.front()->get_name();
}

}  // namespace

int main(int argc, char** argv) {
  keep_waiting_threads_quiet(argv);
  int exit_code = 0;
  CLI::App app("Runs Mixture-of-Experts models larger than memory: experts are streamed from SSD.", "sluice");
  app.set_version_flag("--version", version_text, "show the versions and exit");
  app.require_subcommand(0, 1);  // none is told below, in words of its own
  app.footer("'sluice COMMAND --help' shows a command's flags and examples.");
  sluice::add_run_command(app, exit_code);
  sluice::add_bench_command(app, exit_code);
  sluice::add_inspect_command(app, exit_code);
  sluice::add_pack_command(app, exit_code);
  sluice::add_verify_command(app, exit_code);
  sluice::add_probe_command(app, exit_code);
  sluice::add_replay_command(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& fault) {
    const std::string command = command_path(app);
    fmt::print(stderr, "{}: {} (see '{} --help')\n", command, fault.what(), command);
    return sluice::kExitUsage;
  }
  if (app.get_subcommands().empty()) {
    fmt::print(stderr, "sluice: no command given (see 'sluice --help')\n");
    return sluice::kExitUsage;
  }
  return exit_code;
}
