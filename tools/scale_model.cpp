// scale_model: gives a small trained model experts of real size, with the same routing and answers. See
// tools/README.md.
#include <fmt/format.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "base/bytes.h"
#include "base/result.h"
#include "common/progress_line.h"
#include "common/tensor_type.h"
#include "scale_model/plan.h"
#include "scale_model/writer.h"
#include "store/catalog.h"

namespace sluice::scale_model {
namespace {

struct Options {
  std::string model;
  std::string out;
  std::string type;
  ScaleOptions scale;
};

void declare(CLI::App& app, Options& options) {
  app.add_option("-m,--model", options.model, "GGUF model; any part of a split one")->required();
  app.add_option("--width-factor", options.scale.width_factor,
                 "How many times as wide the residual stream becomes: 1, 4, 16 or 64")
      ->check(CLI::IsMember({1, 4, 16, 64}))
      ->capture_default_str();
  app.add_option("--ff", options.scale.ff, "Inner width of one expert (default: the model's own)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--shared-ff", options.scale.shared_ff, "Inner width of the shared expert (default: the model's own)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--type", options.type, "ggml type of the experts (default: the model's own, copied)");
  app.add_option("--out", options.out, "File to write")->required();
}

// The model must not be replaced by what is made from it, and a disk that is too small is told before the work.
Status check_target(const Catalog& catalog, const std::string& out, uint64_t bytes_needed) {
  struct stat existing {};
  if (::stat(out.c_str(), &existing) == 0) {
    for (const auto& file : catalog.files) {
      if (file->device() == existing.st_dev && file->inode() == existing.st_ino) {
        return make_error(ErrorCode::kBadArgument, "--out is the model itself: '{}'", out);
      }
    }
  }
  std::filesystem::path folder = std::filesystem::path(out).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code failed;
  const std::filesystem::space_info space = std::filesystem::space(folder, failed);
  if (!failed && space.available < bytes_needed) {
    return make_error(ErrorCode::kBadArgument, "'{}' needs {}, and its disk has {}", out, format_bytes(bytes_needed),
                      format_bytes(space.available));
  }
  return {};
}

Status run(Options& options) {
  if (!options.type.empty()) {
    const Result<ggml_type> type = tools::parse_type(options.type);
    if (!type) return make_error(type.error().code, "--type: {}", type.error().text);
    options.scale.type = *type;
  }
  const Result<Catalog> catalog = Catalog::open(options.model, DirectMode::kOff);
  if (!catalog) return catalog.error();
  const Result<ScalePlan> plan = plan_scaling(*catalog, options.scale);
  if (!plan) return plan.error();
  const uint64_t bytes = file_bytes(*plan);
  if (Status target = check_target(*catalog, options.out, bytes); !target) return target;
  {
    tools::ProgressLine line("scale_model", plan->tensor_bytes());
    Status written = write_scaled(*catalog, *plan, options.out, [&](uint64_t done) { line.update(done); });
    if (!written) return written;
  }
  fmt::print("{}: {} layers of {} experts of {}, {} in all\n", options.out, catalog->expert_layers.size(),
             catalog->n_expert, format_bytes(plan->record_bytes), format_bytes(bytes));
  return {};
}

}  // namespace
}  // namespace sluice::scale_model

int main(int argc, char** argv) {
  CLI::App app{"Gives a small trained model experts of real size by zero padding: same routing, same answers."};
  sluice::scale_model::Options options;
  sluice::scale_model::declare(app, options);
  CLI11_PARSE(app, argc, argv);
  const sluice::Status status = sluice::scale_model::run(options);
  if (!status.ok()) {
    fmt::print(stderr, "scale_model: {}\n", status.error().message());
    return 1;
  }
  return 0;
}
