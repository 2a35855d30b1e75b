// The plugin's entry point. ggml calls ggml_backend_init after loading the library that GGML_BACKEND_PATH names.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "backend/engine.h"
#include "backend/registry.h"
#include "backend/stats_json.h"
#include "base/log.h"
#include "ggml-backend-impl.h"
#include "ggml-sluice.h"

namespace {

// SLUICE_STATS=FILE: the statistics, written when the process ends.
void write_stats_at_exit() {
  const char* path = std::getenv("SLUICE_STATS");
  if (path == nullptr || *path == '\0') return;
  const std::string text = sluice::engine_stats_json(sluice::engine_stats()).dump(2) + "\n";
  const std::string temporary = std::string(path) + ".tmp";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr) {
    sluice::log_warning("SLUICE_STATS: {} cannot be written", temporary);
    return;
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written || std::rename(temporary.c_str(), path) != 0) {
    sluice::log_warning("SLUICE_STATS: {} cannot be written", path);
    std::remove(temporary.c_str());
  }
}

ggml_backend_reg_t plugin_reg() {
  const auto options = sluice::engine_options_from_environment();
  if (options) {
    sluice::engine_set_options(*options);
  } else {
    // The user asked for something that cannot be had; a null registry would make the host run on without us and hide it.
    // So the device is there and starts for nobody.
    sluice::Registry::instance().refuse(options.error());
  }
  std::atexit(write_stats_at_exit);
  return ggml_backend_sluice_reg();
}

}  // namespace

GGML_BACKEND_DL_IMPL(plugin_reg)
