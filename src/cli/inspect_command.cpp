#include "cli/inspect_command.h"

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>

#include "backend/engine.h"
#include "cli/exit_code.h"
#include "cli/inspect_report.h"
#include "store/catalog.h"

namespace sluice {

namespace {

struct InspectCommand {
  std::string model_path;
  bool json = false;
};

int run_inspect(const InspectCommand& command) {
  const auto fail = [](const Error& error) {
    fmt::print(stderr, "sluice: {}\n", error.message());
    return kExitFailure;
  };
  // Opened as a run would: what direct I/O has to align is part of the smallest budget.
  const auto catalog = Catalog::open(command.model_path, DirectMode::kAuto);
  if (!catalog) return fail(catalog.error());

  const uint64_t budget_bytes_min = catalog->is_moe() ? engine_budget_bytes_min(*catalog) : 0;
  const std::string text = command.json ? inspect_json_text(inspect_json(*catalog, budget_bytes_min))
                                        : inspect_text(*catalog, budget_bytes_min);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return fail(make_system_error(ErrorCode::kDeviceError, errno, "cannot write to standard output"));
  }
  return 0;
}

}  // namespace

void add_inspect_command(CLI::App& app, int& exit_code) {
  auto state = std::make_shared<InspectCommand>();
  CLI::App* command =
      app.add_subcommand("inspect", "show a model's experts, where its bytes are and its smallest budget");
  command->footer(
      "Examples:\n"
      "  sluice inspect model.gguf\n"
      "  sluice inspect model-00001-of-00003.gguf --json | jq .expert_bytes");
  command->add_option("model", state->model_path, "GGUF file; any part of a split model")
      ->required()
      ->type_name("FILE");
  command->add_flag("--json", state->json, "JSON instead of text");
  command->callback([state, &exit_code] { exit_code = run_inspect(*state); });
}

}  // namespace sluice
