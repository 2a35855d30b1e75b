// Runs a model twice for the golden tests: as stock llama.cpp holds it, and streamed by sluice. Both in one process:
// the stock runs come first, because once our device is registered llama.cpp gives it the experts of every model.
//
// Stock here means the same kernels: weights mapped, and no repacked copies (use_extra_bufts off) unless `repack` asks for them.
// Errors   whatever goes wrong ends the test program with a line; these are tests.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "ggml-sluice.h"
#include "llama.h"
#include "store/catalog.h"
#include "store/model_stream.h"

namespace sluice::golden {

[[noreturn]] inline void die(const std::string& line) {
  std::fprintf(stderr, "golden: %s\n", line.c_str());
  std::exit(1);
}

struct ModelFree {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
using Model = std::unique_ptr<llama_model, ModelFree>;

inline void quiet_llama() {
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
  }, nullptr);
}

inline Model load_stock(const std::string& path, bool repack = false) {
  engine_register_cpu_backend();
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = repack;
  params.n_gpu_layers = 0;
  Model model(llama_model_load_from_file(path.c_str(), params));
  if (!model) die("stock llama.cpp does not load " + path);
  return model;
}

inline Model load_streamed(const Catalog& catalog, const EngineOptions& options, bool repack = false) {
  engine_register_backend();
  engine_set_options(options);
  engine_set_catalog(catalog);
  auto stream = open_model_stream(catalog);
  if (!stream) die(stream.error().message());
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = repack;
  params.n_gpu_layers = 0;
  params.load_mode = LLAMA_LOAD_MODE_NONE;
  params.lazy_mode = LLAMA_LAZY_MODE_OFF;
  Model model(llama_model_load_from_file_ptr(*stream, params));
  std::fclose(*stream);
  if (!model) die("llama.cpp does not load the stream");
  return model;
}

struct RunSpec {
  std::vector<llama_token> prompt;
  uint32_t ubatch = 512;
  int threads = 1;
  bool see_layers = false;  // the engine is shown what leaves each layer, as our program does when it predicts
  int decode = 4;  // tokens generated greedily after the prompt
};

struct RunResult {
  std::vector<llama_token> tokens;          // generated
  std::vector<std::vector<float>> logits;   // of the last prompt token, then of each generated one
  bool decoded = true;                      // false: llama_decode refused (recorded, so that both can be compared)
};

inline RunResult run(llama_model* model, const RunSpec& spec) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(spec.prompt.size()) + static_cast<uint32_t>(spec.decode) + 8;
  params.n_batch = static_cast<uint32_t>(spec.prompt.size()) + 8;
  params.n_ubatch = spec.ubatch;
  params.n_threads = spec.threads;
  params.n_threads_batch = spec.threads;
  if (spec.see_layers) params.cb_eval = engine_see_tensor;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) die("no context: " + (engine_last_error().ok() ? std::string("llama.cpp refused") : engine_last_error().error().message()));
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  RunResult result;
  std::vector<llama_token> batch = spec.prompt;
  for (int step = 0; step <= spec.decode; ++step) {
    if (llama_decode(context, llama_batch_get_one(batch.data(), static_cast<int32_t>(batch.size()))) != 0) {
      result.decoded = false;
      break;
    }
    const float* logits = llama_get_logits_ith(context, -1);
    result.logits.emplace_back(logits, logits + n_vocab);
    llama_token best = 0;
    for (int i = 1; i < n_vocab; ++i) {
      if (logits[i] > logits[best]) best = i;
    }
    if (step < spec.decode) result.tokens.push_back(best);
    batch = {best};
  }
  llama_free(context);
  return result;
}

// Empty when equal bit for bit, else what differs first.
inline std::string difference(const RunResult& expected, const RunResult& given) {
  if (expected.decoded != given.decoded) return "one of them fails to decode";
  if (expected.logits.size() != given.logits.size()) return "different numbers of steps";
  for (size_t step = 0; step < expected.logits.size(); ++step) {
    const auto& a = expected.logits[step];
    const auto& b = given.logits[step];
    if (a.size() != b.size()) return "different vocabularies";
    for (size_t i = 0; i < a.size(); ++i) {
      if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
        return "step " + std::to_string(step) + ", logit " + std::to_string(i) + ": " + std::to_string(a[i]) + " and " +
               std::to_string(b[i]);
      }
    }
  }
  if (expected.tokens != given.tokens) return "different tokens";
  return "";
}

}  // namespace sluice::golden
