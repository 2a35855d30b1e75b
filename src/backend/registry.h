// What all of the backend's C callbacks share: the options, the catalog of the model to come, the models there are,
// the last error. One per process, as ggml's own registry is.
//
// Models   a new model begins when a tensor comes that the one being collected has already, or that comes after it
//          was finished. (llama.cpp names no model at a buffer; layer and matrix name the tensor.)
// Threads  thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/engine.h"
#include "backend/streamed_model.h"

namespace sluice {

class Registry {
 public:
  static Registry& instance();

  void set_options(const EngineOptions& options);
  EngineOptions options() const;
  void set_catalog(std::shared_ptr<const Catalog> catalog);

  // The model that a tensor of this name belongs to.
  std::shared_ptr<StreamedModel> model_for(ExpertTensorName name);
  // A setting that cannot be used: nothing starts then, so that a wish that cannot be met is not passed over.
  void refuse(const Status& status);
  // Finishes every model whose tensors are all there; the first error.
  Status finish_models();
  // The model loaded last, if it is still there.
  std::shared_ptr<StreamedModel> newest() const;
  // Of the newest model; of the last one that was freed when there is none.
  EngineStats stats() const;
  // A model that is being freed leaves its figures.
  void retire(const EngineStats& stats);

  void set_last_error(const Status& status);
  Status last_error() const;

  void set_threadpool(ggml_threadpool_t threadpool);
  ggml_threadpool_t threadpool() const;

 private:
  mutable std::mutex mutex_;
  EngineOptions options_;
  std::shared_ptr<const Catalog> catalog_;
  std::vector<std::weak_ptr<StreamedModel>> models_;
  std::weak_ptr<StreamedModel> collecting_;
  mutable std::mutex retired_mutex_;  // of its own: a model may be freed while mutex_ is held
  EngineStats retired_stats_;
  Status refusal_;
  Status last_error_;
  ggml_threadpool_t threadpool_ = nullptr;
};

}  // namespace sluice
