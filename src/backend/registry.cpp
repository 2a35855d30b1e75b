#include "backend/registry.h"

#include <utility>

namespace sluice {

// Never destroyed: llama.cpp frees models and backends from exit handlers, in an order we do not know.
Registry& Registry::instance() {
  static Registry* registry = new Registry;
  return *registry;
}

void Registry::set_options(const EngineOptions& options) {
  std::lock_guard lock(mutex_);
  options_ = options;
}

EngineOptions Registry::options() const {
  std::lock_guard lock(mutex_);
  return options_;
}

void Registry::set_catalog(std::shared_ptr<const Catalog> catalog) {
  std::lock_guard lock(mutex_);
  catalog_ = std::move(catalog);
  collecting_.reset();
}

std::shared_ptr<StreamedModel> Registry::model_for(ExpertTensorName name) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<StreamedModel> model = collecting_.lock();
  if (model && model->accepts(name)) return model;
  model = std::make_shared<StreamedModel>(options_, catalog_);
  std::erase_if(models_, [](const auto& known) { return known.expired(); });
  models_.push_back(model);
  collecting_ = model;
  return model;
}

void Registry::refuse(const Status& status) {
  std::lock_guard lock(mutex_);
  refusal_ = status;
}

Status Registry::finish_models() {
  std::vector<std::shared_ptr<StreamedModel>> models;
  {
    std::lock_guard lock(mutex_);
    if (!refusal_.ok()) return refusal_;
    for (const auto& known : models_) {
      if (auto model = known.lock()) models.push_back(std::move(model));
    }
  }
  Status first;
  for (const auto& model : models) {
    if (!model->can_finish()) continue;
    if (Status status = model->finish(); !status && first.ok()) first = status;
  }
  return first;
}

std::shared_ptr<StreamedModel> Registry::newest() const {
  std::lock_guard lock(mutex_);
  for (auto it = models_.rbegin(); it != models_.rend(); ++it) {
    if (auto model = it->lock()) return model;
  }
  return nullptr;
}

EngineStats Registry::stats() const {
  if (const auto model = newest()) return model->stats();
  std::lock_guard lock(retired_mutex_);
  return retired_stats_;
}

void Registry::retire(const EngineStats& stats) {
  std::lock_guard lock(retired_mutex_);
  retired_stats_ = stats;
}

void Registry::set_last_error(const Status& status) {
  std::lock_guard lock(mutex_);
  last_error_ = status;
}

Status Registry::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

void Registry::set_threadpool(ggml_threadpool_t threadpool) {
  std::lock_guard lock(mutex_);
  threadpool_ = threadpool;
}

ggml_threadpool_t Registry::threadpool() const {
  std::lock_guard lock(mutex_);
  return threadpool_;
}

}  // namespace sluice
