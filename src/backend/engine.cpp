#include "backend/engine.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "backend/registry.h"
#include "backend/stats_json.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-sluice.h"
#include "loader/slot_plan.h"

namespace sluice {

namespace {

struct Setting {
  const char* name;         // of the option; SLUICE_NAME in the environment
  Status (*set)(EngineOptions& options, const std::string& value);
};

// Folders with ':' between them, as in PATH.
std::vector<std::string> split_path_list(const std::string& value) {
  std::vector<std::string> folders;
  std::stringstream list(value);
  for (std::string folder; std::getline(list, folder, ':');) {
    if (!folder.empty()) folders.push_back(folder);
  }
  return folders;
}

Result<Wish> parse_wish(std::string_view what, const std::string& value) {
  if (value == "auto") return Wish::kTry;
  if (value == "on") return Wish::kDemand;
  if (value == "off") return Wish::kNo;
  return make_error(ErrorCode::kBadArgument, "{}: wanted auto, on or off, given '{}'", what, value);
}

template <typename T>
Status assign(T& target, const Result<T>& parsed) {
  if (!parsed) return parsed.error();
  target = *parsed;
  return {};
}

constexpr Setting kSettings[] = {
    {"budget", [](EngineOptions& o, const std::string& v) { return assign(o.budget, parse_budget(v)); }},
    {"io", [](EngineOptions& o, const std::string& v) { return assign(o.io.path, parse_io_path(v)); }},
    {"direct", [](EngineOptions& o, const std::string& v) { return assign(o.direct, parse_direct_mode(v)); }},
    {"mirror",
     [](EngineOptions& o, const std::string& v) {
       o.mirrors = split_path_list(v);
       return Status();
     }},
    {"policy", [](EngineOptions& o, const std::string& v) { return assign(o.policy, parse_policy(v)); }},
    {"prefetch", [](EngineOptions& o, const std::string& v) { return assign(o.prefetch, parse_prefetch_mode(v)); }},
    {"prefetch_plan", [](EngineOptions& o, const std::string& v) { return assign(o.prefetch_plan, parse_prefetch_plan(v)); }},
    {"fit", [](EngineOptions& o, const std::string& v) { return assign(o.fit, parse_switch("fit", v)); }},
    {"lock", [](EngineOptions& o, const std::string& v) { return assign(o.lock, parse_wish("lock", v)); }},
    {"huge_pages", [](EngineOptions& o, const std::string& v) { return assign(o.huge, parse_wish("huge_pages", v)); }},
    {"per_layer", [](EngineOptions& o, const std::string& v) { return assign(o.per_layer, parse_switch("per_layer", v)); }},
    {"fused", [](EngineOptions& o, const std::string& v) { return assign(o.fused, parse_fused_mode(v)); }},
    {"test_drive",
     [](EngineOptions& o, const std::string& v) {
       const auto drive = parse_paced_drive(v);
       if (!drive) return Status(drive.error());
       o.test_drive = *drive;
       return Status();
     }},
    {"trace",
     [](EngineOptions& o, const std::string& v) {
       o.trace_path = v;
       return Status();
     }},
    {"verify_reads", [](EngineOptions& o, const std::string& v) { return assign(o.verify_reads, parse_switch("verify_reads", v)); }},
    {"verify_slots", [](EngineOptions& o, const std::string& v) { return assign(o.verify_slots, parse_switch("verify_slots", v)); }},
};

std::string environment_name(std::string_view name) {
  std::string result = "SLUICE_";
  for (const char c : name) result.push_back(static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c));
  return result;
}

}  // namespace

Result<PrefetchMode> parse_prefetch_mode(const std::string& text) {
  if (text == "off") return PrefetchMode::kOff;
  if (text == "probe") return PrefetchMode::kProbe;
  if (text == "on") return PrefetchMode::kOn;
  if (text == "auto") return PrefetchMode::kAuto;
  return make_error(ErrorCode::kBadArgument, "prefetch: wanted auto, on, off or probe, given '{}'", text);
}

const char* prefetch_mode_name(PrefetchMode mode) {
  switch (mode) {
    case PrefetchMode::kOff: return "off";
    case PrefetchMode::kProbe: return "probe";
    case PrefetchMode::kOn: return "on";
    case PrefetchMode::kAuto: return "auto";
  }
  return "off";
}

Result<bool> parse_switch(std::string_view what, const std::string& value) {
  if (value == "1" || value == "on" || value == "true") return true;
  if (value == "0" || value == "off" || value == "false") return false;
  return make_error(ErrorCode::kBadArgument, "{}: wanted on or off, given '{}'", what, value);
}

void engine_register_cpu_backend() {
  if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) ggml_backend_register(ggml_backend_cpu_reg());
}

void engine_register_backend() {
  static const bool registered = [] {
    engine_register_cpu_backend();
    ggml_backend_register(ggml_backend_sluice_reg());
    return true;
  }();
  (void)registered;
}

Result<EngineOptions> engine_options_from_environment() {
  EngineOptions options;
  for (const Setting& setting : kSettings) {
    const std::string name = environment_name(setting.name);
    const char* value = std::getenv(name.c_str());
    if (value == nullptr || *value == '\0') continue;
    if (Status status = setting.set(options, value); !status) {
      return make_error(status.error().code, "{}: {}", name, status.error().text);
    }
  }
  return options;
}

Status check_engine_options(const EngineOptions& options) {
  if (options.io.path == IoPath::kSynthetic && (options.verify_slots || options.verify_reads)) {
    return make_error(ErrorCode::kBadArgument, "io synthetic reads nothing: {} has nothing to verify",
                      options.verify_slots ? "verify_slots" : "verify_reads");
  }
  return {};
}

void engine_set_options(const EngineOptions& options) { Registry::instance().set_options(options); }

void engine_set_catalog(const Catalog& catalog) {
  Registry::instance().set_catalog(std::make_shared<const Catalog>(catalog));
}

uint64_t engine_budget_bytes_min(const Catalog& catalog, bool per_layer) {
  return plan_layout(layer_sources(catalog), catalog.n_expert_used, per_layer).bytes_min;
}

bool engine_see_tensor(ggml_tensor* tensor, bool ask, void*) {
  constexpr std::string_view kLayerOutput = "l_out-";  // llama.cpp's name for what leaves a layer
  const std::string_view name = tensor->name;
  if (!name.starts_with(kLayerOutput) || tensor->type != GGML_TYPE_F32 || !ggml_is_contiguous(tensor)) return !ask;
  uint32_t layer = 0;
  const char* const end = name.data() + name.size();
  if (const auto [at, error] = std::from_chars(name.data() + kLayerOutput.size(), end, layer); error != std::errc() || at != end) {
    return !ask;
  }
  const auto model = Registry::instance().newest();
  const auto n_row = static_cast<size_t>(ggml_nrows(tensor));
  if (!model || !model->wants_output(layer, n_row)) return !ask;
  if (ask) return true;
  const auto n_embd = static_cast<size_t>(tensor->ne[0]);
  static thread_local std::vector<float> rows;
  rows.resize(n_row * n_embd);
  ggml_backend_tensor_get(tensor, rows.data(), 0, rows.size() * sizeof(float));
  model->see_output(layer, rows.data(), n_row, n_embd);
  return true;
}

EngineStats engine_stats() { return Registry::instance().stats(); }

Status engine_last_error() { return Registry::instance().last_error(); }

void engine_set_threadpool(ggml_threadpool* threadpool) { Registry::instance().set_threadpool(threadpool); }

}  // namespace sluice

bool ggml_backend_sluice_set_option(const char* name, const char* value, char* error, size_t error_size) {
  sluice::EngineOptions options = sluice::Registry::instance().options();
  std::string line = fmt::format("no option is called '{}'", name);
  for (const sluice::Setting& setting : sluice::kSettings) {
    if (std::string_view(setting.name) != name) continue;
    const sluice::Status status = setting.set(options, value);
    if (status.ok()) {
      sluice::Registry::instance().set_options(options);
      return true;
    }
    line = status.error().message();
  }
  if (error != nullptr && error_size > 0) {
    const size_t length = std::min(line.size(), error_size - 1);
    std::memcpy(error, line.data(), length);
    error[length] = '\0';
  }
  return false;
}

size_t ggml_backend_sluice_get_stats(char* json, size_t size) {
  const std::string text = sluice::engine_stats_json(sluice::engine_stats()).dump();
  if (json != nullptr && size > 0) {
    const size_t length = std::min(text.size(), size - 1);
    std::memcpy(json, text.data(), length);
    json[length] = '\0';
  }
  return text.size();
}
