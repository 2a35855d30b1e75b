// One loaded model with one context, ready to decode: the catalog, the memory sum, the engine's options, the loading
// through the expert-free stream, the thread pools. Samples nothing and knows no text (cli/generator.h does).
//
// Order    open: catalog -> budget -> engine options -> backend registered -> model -> context -> thread pools.
//          A model without experts is mapped and run by llama.cpp alone; streaming() is false.
// Owns     model, context, thread pools; frees them in the reverse order.
// Errors   those of the catalog and the budget; kBadFile or kUnsupported with llama.cpp's reason when it refuses the
//          model; kCancelled when a stop signal ended the work; kDeviceError or the engine's own error from decode.
// Threads  thread-compatible; the abort check runs on llama.cpp's compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "base/result.h"
#include "llama.h"
#include "store/catalog.h"

namespace sluice {

struct SessionOptions {
  std::string model_path;
  EngineOptions engine;
  uint32_t context_tokens = 0;  // 0: the model's training context, at most 4096
  uint32_t batch_tokens = 2048;
  uint32_t ubatch_tokens = 0;   // 0: choose_ubatch of cli/budget_plan.h
  int threads = 0;        // 0: the usable CPUs
  int threads_batch = 0;  // 0: as threads
  bool repack = false;
  bool all_outputs = false;  // every token of a batch is computed to the end, not the last alone; costs memory
};

class ModelSession {
 public:
  static Result<std::unique_ptr<ModelSession>> open(const SessionOptions& options);

  ModelSession(const ModelSession&) = delete;
  ModelSession& operator=(const ModelSession&) = delete;
  ~ModelSession();

  // Appends at most batch_tokens() tokens to the context's memory; the last one's logits are then to be had.
  // After an error the memory's contents are unknown: clear it before the next use.
  Status decode(const llama_token* tokens, size_t count);

  llama_model* model() const { return model_.get(); }
  llama_context* context() const { return context_.get(); }
  const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
  const Catalog& catalog() const { return catalog_; }
  uint32_t context_tokens() const { return llama_n_ctx(context_.get()); }
  uint32_t batch_tokens() const { return llama_n_batch(context_.get()); }
  int threads() const { return threads_; }
  bool streaming() const { return catalog_.is_moe(); }

 private:
  struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  struct FreeContext {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  struct FreeThreadpool {
    void operator()(ggml_threadpool* threadpool) const { ggml_threadpool_free(threadpool); }
  };

  ModelSession() = default;
  Status plan_memory(SessionOptions& options);
  Status load_model(const SessionOptions& options);
  Status make_context(const SessionOptions& options);

  Catalog catalog_;
  int threads_ = 0;
  std::vector<int8_t> wanted_outputs_;  // with all_outputs: one for each token of a batch
  std::unique_ptr<ggml_threadpool, FreeThreadpool> threadpool_;
  std::unique_ptr<ggml_threadpool, FreeThreadpool> threadpool_batch_;  // empty: the same as for single tokens
  std::unique_ptr<llama_model, FreeModel> model_;
  std::unique_ptr<llama_context, FreeContext> context_;
};

}  // namespace sluice
