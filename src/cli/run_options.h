// What `sluice run` can be told, as one struct, and the flags that fill it. Reads no file and no environment.
//
// Errors   the flags' own checks (a budget, a range, a name) throw CLI11's ParseError inside app.parse, which main
//          turns into one line and exit code 2; contradictions between flags come from check_run_options.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "base/log.h"
#include "base/result.h"

namespace sluice {

struct RunOptions {
  std::string model_path;

  std::optional<std::string> prompt;
  std::string prompt_file;
  std::string system;
  bool raw = false;  // no chat template

  int32_t tokens_max = 256;     // of one answer; negative: until the model ends or the context is full
  uint32_t context_tokens = 0;  // 0: the model's training context, at most 4096
  uint32_t batch_tokens = 2048;
  uint32_t ubatch_tokens = 0;  // 0: auto
  int threads = 0;        // 0: the CPUs this process may use
  int threads_batch = 0;  // 0: as threads
  bool repack = false;

  float temperature = 0.8f;
  int32_t top_k = 40;
  float top_p = 0.95f;
  float min_p = 0.05f;
  uint32_t seed = UINT32_MAX;  // llama.cpp's sign for a random one
  bool ignore_eos = false;

  // Set only when the flag was given; the environment's value stands otherwise.
  std::optional<BudgetSpec> budget;
  std::optional<IoPath> io;
  std::optional<DirectMode> direct;
  std::vector<std::string> mirrors;
  std::optional<PolicyKind> policy;
  std::optional<bool> per_layer;
  std::optional<FusedMode> fused;
  std::optional<PrefetchMode> prefetch;
  bool verify_reads = false;
  std::optional<bool> fit;
  bool verify_slots = false;

  std::string stats_path;
  std::string logits_path;
  std::string tokens_path;
  std::string trace_path;
  LogLevel log_level = LogLevel::kWarning;
  bool quiet = false;
};

// Adds the flags of `run` to a command. `options` must outlive the command's parse.
void add_run_options(CLI::App& command, RunOptions& options);

// What no single flag can see: prompts from two places, a system text without a chat template, and so on.
// `chatting`: there is no prompt and standard input is a terminal.
Status check_run_options(const RunOptions& options, bool chatting);

// The environment's options, with the flags that were given laid over them.
EngineOptions engine_options_with_flags(const EngineOptions& environment, const RunOptions& options);

}  // namespace sluice
