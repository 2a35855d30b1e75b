// What sluice's own program uses of the backend beyond the C face: settings as a struct, the catalog of the model that
// is about to be loaded, figures as a struct. The plugin uses only include/ggml-sluice.h.
//
// Threads  call from the thread that loads models; engine_stats from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "io/device.h"
#include "io/paced_device.h"
#include "moe/block_executor.h"
#include "policy/eviction.h"
#include "pool/slot_memory.h"
#include "predict/prefetch_plan.h"
#include "store/catalog.h"
#include "trace/engine_stats.h"

struct ggml_tensor;
struct ggml_threadpool;

namespace sluice {

// What is done about experts that the next layers will want.
enum class PrefetchMode : uint8_t {
  kOff,
  kProbe,  // predictions are made and measured, nothing is read
  kOn,
  kAuto,  // while it measurably pays
};
Result<PrefetchMode> parse_prefetch_mode(const std::string& text);
const char* prefetch_mode_name(PrefetchMode mode);

struct EngineOptions {
  BudgetSpec budget;
  DeviceOptions io;
  DirectMode direct = DirectMode::kAuto;
  std::vector<std::string> mirrors;  // folders with copies of the model's files, on other drives
  PolicyKind policy = PolicyKind::kLfru;
  bool per_layer = false;      // every layer has slots of its own
  PrefetchMode prefetch = PrefetchMode::kOff;
  PrefetchPlan prefetch_plan;
  bool fit = true;            // a budget that memory cannot hold is made smaller, and the pool follows what is left
  Wish lock = Wish::kTry;     // slots are taken whole at the start and kept from the kernel's reclaim
  Wish huge = Wish::kTry;     // slots in huge pages
  FusedMode fused = FusedMode::kAuto;
  bool verify_slots = false;  // compare slots with the store while running
  bool verify_reads = false;  // compare reads with the pack's checksums
  std::string trace_path;     // a routing trace is written there; empty: none

  // For measurements: experts are read as from a drive of this speed (io/paced_device.h).
  std::optional<PacedDrive> test_drive;
  // For tests: slots are overwritten when they are given up, and the device is wrapped in another.
  bool poison_released_slots = false;
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap_device;
};

// Registers ggml's CPU backend, unless it is there already, and sluice's own; once. To be called before llama_backend_init,
// which would otherwise look for backends to load from files. The first alone gives stock llama.cpp.
void engine_register_cpu_backend();
void engine_register_backend();

// "on" or "off"; kBadArgument names `what`.
Result<bool> parse_switch(std::string_view what, const std::string& value);

// From the environment (SLUICE_BUDGET, SLUICE_IO, ...); an unusable value is an error that names the variable.
Result<EngineOptions> engine_options_from_environment();

// What no single setting can see: verifying what is never read, for one.
Status check_engine_options(const EngineOptions& options);

// Options for the models loaded from now on.
void engine_set_options(const EngineOptions& options);

// The next model that llama.cpp loads is this one: its experts are read from the catalog's files. Without this call
// the backend finds the file by itself, as it does in stock tools.
void engine_set_catalog(const Catalog& catalog);

// The smallest budget that works for a model, and the slots that a budget gives.
uint64_t engine_budget_bytes_min(const Catalog& catalog, bool per_layer = false);

// For llama_context_params.cb_eval: shows the engine the residual stream between layers, which predictions are made from.
// Changes no result. Asks for nothing, and so cuts no graph, where the model loaded last predicts nothing.
bool engine_see_tensor(ggml_tensor* tensor, bool ask, void* unused);

// Of the model loaded last.
EngineStats engine_stats();

// Why the last graph computation failed, if it did: the error to show when llama_decode returns non-zero.
Status engine_last_error();

// The thread pool that the expert computation shares with the CPU backend; nullptr gives it its own.
void engine_set_threadpool(ggml_threadpool* threadpool);

}  // namespace sluice
