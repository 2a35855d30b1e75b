// Preloaded into test-llama-archs, which writes small models and, where backends are dynamic libraries, loads none.
#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace {

[[gnu::constructor]] void register_cpu_backend() { ggml_backend_register(ggml_backend_cpu_reg()); }

}  // namespace
