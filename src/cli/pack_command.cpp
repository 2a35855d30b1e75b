#include "cli/pack_command.h"

#include <cstdio>
#include <memory>
#include <string>

#include "backend/engine.h"
#include "base/clock.h"
#include "cli/exit_code.h"
#include "cli/progress_bar.h"
#include "cli/signals.h"
#include "ggml.h"
#include "moe/native_layout.h"
#include "store/catalog.h"
#include "store/pack_writer.h"
#include "store/verify.h"

namespace sluice {

namespace {

struct PackCommand {
  std::string model_path;
  std::string folder;
  std::string layout = "raw";
  bool read_back = true;
};

struct VerifyCommand {
  std::string model_path;
};

// Damaged tensors that are named one by one; of the others only the number.
constexpr size_t kDamageLinesMax = 100;

int fail(const Error& error) {
  fmt::print(stderr, "sluice: {}\n", error.message());
  return error.code == ErrorCode::kCancelled && stop_requested() ? exit_code_of(stop_signal()) : kExitFailure;
}

struct OpenModel {
  Catalog catalog;
  std::unique_ptr<Device> device;
};

Result<OpenModel> open_model(const std::string& path) {
  auto catalog = Catalog::open(path, DirectMode::kAuto);
  if (!catalog) return catalog.error();
  auto device = open_device({});
  if (!device) return device.error();
  return OpenModel{std::move(*catalog), std::move(*device)};
}

WorkProgress progress_on(ProgressBar& bar) {
  return [&bar](const char* phase, uint64_t done_bytes, uint64_t total_bytes) {
    bar.show(phase, done_bytes, total_bytes);
    return !stop_requested();
  };
}

int run_pack(const PackCommand& command) {
  install_stop_signals();
  const auto layout = parse_pack_layout(command.layout);
  if (!layout) return fail(layout.error());
  auto model = open_model(command.model_path);
  if (!model) return fail(model.error());

  ProgressBar bar;
  PackOptions options{.read_back = command.read_back, .on_progress = progress_on(bar)};
  std::unique_ptr<NativeLayout> native;
  if (*layout == PackLayout::kNative) {
    engine_register_cpu_backend();
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);  // ggml tells every single matrix
    auto found = NativeLayout::create();
    if (!found) return fail(found.error());
    native = std::move(*found);
    options.transform = native.get();
  }
  const std::string folder = command.folder.empty() ? default_pack_folder(command.model_path) : command.folder;
  const int64_t begin_ns = now_ns();
  const auto report = write_pack(model->catalog, *model->device, folder, options);
  bar.clear();
  if (!report) return fail(report.error());
  const double seconds = seconds_of(now_ns() - begin_ns);
  fmt::print("{}: {} experts in {}, {} of dense weights, id {}, {:.1f} s{}\n", folder, report->n_record,
             format_bytes(report->experts_file_bytes), format_bytes(report->dense_bytes), report->id.text(), seconds,
             command.read_back ? ", read back and compared" : "");
  if (native) {
    fmt::print("native layout of {}: {} of the layers' matrices have one, the others stay as they are\n", native->tag(),
               report->n_native);
  }
  return 0;
}

int run_verify(const VerifyCommand& command) {
  install_stop_signals();
  auto model = open_model(command.model_path);
  if (!model) return fail(model.error());
  ProgressBar bar;
  const int64_t begin_ns = now_ns();
  const auto report = verify_model(model->catalog, *model->device, progress_on(bar));
  bar.clear();
  if (!report) return fail(report.error());
  for (size_t i = 0; i < std::min(report->damages.size(), kDamageLinesMax); ++i)
    fmt::print("{}\n", report->damages[i].message());
  if (report->damages.size() > kDamageLinesMax)
    fmt::print("... and {} more\n", report->damages.size() - kDamageLinesMax);
  if (!report->padded.empty()) {
    fmt::print("{} tensors have zeros at the same place in every expert: the model's own padding\n",
               report->padded.size());
  }
  fmt::print("{}: {} tensors, {} experts' matrices, {} in {:.1f} s, {}: {}\n", command.model_path, report->n_tensor,
             report->n_slab, format_bytes(report->bytes), seconds_of(now_ns() - begin_ns),
             report->checksums ? "compared with their checksums"
                               : "no checksums in a GGUF, checked for zeros and for values that are no numbers",
             report->damages.empty() ? "sound" : fmt::format("{} damaged", report->damages.size()));
  return report->damages.empty() ? 0 : kExitFailure;
}

}  // namespace

void add_pack_command(CLI::App& app, int& exit_code) {
  auto state = std::make_shared<PackCommand>();
  CLI::App* command =
      app.add_subcommand("pack", "copy a model so that every expert is one aligned record: a miss is then one read");
  command->footer(
      "Examples:\n"
      "  sluice pack model.gguf                        # makes model.pack\n"
      "  sluice pack model-00001-of-00003.gguf /fast/model.pack\n"
      "  sluice pack model.gguf --layout native        # for this machine's kernels only\n"
      "  sluice run -m model.pack -p 'Hello'");
  command->add_option("model", state->model_path, "GGUF file, any part of a split model, or a raw pack")
      ->required()
      ->type_name("FILE");
  command->add_option("out", state->folder, "folder to make (default: the model's name with .pack)")
      ->type_name("FOLDER");
  command->add_option("--layout", state->layout, "raw: any machine; native: rearranged for this machine's kernels")
      ->check(CLI::IsMember({"raw", "native"}))
      ->type_name("LAYOUT")
      ->capture_default_str();
  command->add_flag("!--no-read-back", state->read_back,
                    "do not read the finished pack back from the drive to compare it");
  command->callback([state, &exit_code] { exit_code = run_pack(*state); });
}

void add_verify_command(CLI::App& app, int& exit_code) {
  auto state = std::make_shared<VerifyCommand>();
  CLI::App* command =
      app.add_subcommand("verify", "read a whole model and name every damaged or unwritten tensor and expert");
  command->footer(
      "Examples:\n"
      "  sluice verify model.gguf\n"
      "  sluice verify model.pack    # against the pack's checksums");
  command->add_option("model", state->model_path, "GGUF file, any part of a split model, or a pack")
      ->required()
      ->type_name("PATH");
  command->callback([state, &exit_code] { exit_code = run_verify(*state); });
}

}  // namespace sluice
