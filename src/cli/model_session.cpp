#include "cli/model_session.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/log.h"
#include "cli/budget_plan.h"
#include "cli/logging.h"
#include "cli/signals.h"
#include "ggml-sluice.h"
#include "io/system_memory.h"
#include "store/model_stream.h"

namespace sluice {

namespace {

// How long after Ctrl-C a computation may go on. A token that ends in time leaves the memory in order, so that a chat
// can go on from it; an aborted one does not.
constexpr double kStopGraceSeconds = 0.3;

bool stop_is_due(void*) {
  return stop_requested() && stop_seconds() >= kStopGraceSeconds;
}
bool loading_may_continue(float, void*) {
  return !stop_requested();
}

Error stopped_error() {
  return make_error(ErrorCode::kCancelled, "stopped");
}

// A plugin named in the environment would register a second engine beside the one that is linked in.
void forbid_plugin() {
  const char* plugin = std::getenv("GGML_BACKEND_PATH");
  if (!plugin) return;
  log_warning("GGML_BACKEND_PATH={} is not used: this program has the backend built in", plugin);
  unsetenv("GGML_BACKEND_PATH");
}

std::unique_ptr<std::FILE, int (*)(std::FILE*)> own(std::FILE* file) {
  return {file, std::fclose};
}

}  // namespace

Result<std::unique_ptr<ModelSession>> ModelSession::open(const SessionOptions& wanted) {
  SessionOptions options = wanted;
  std::unique_ptr<ModelSession> session(new ModelSession);
  session->threads_ = options.threads > 0 ? options.threads : static_cast<int>(usable_cpu_count());

  forbid_plugin();
  Result<Catalog> catalog = Catalog::open(options.model_path, options.engine.direct);
  if (!catalog) return catalog.error();
  session->catalog_ = std::move(*catalog);

  if (Status planned = session->plan_memory(options); !planned) return planned.error();
  if (Status loaded = session->load_model(options); !loaded) return loaded.error();
  if (Status made = session->make_context(options); !made) return made.error();
  return session;
}

ModelSession::~ModelSession() {
  context_.reset();
  model_.reset();
  if (streaming()) engine_set_threadpool(nullptr);
}

// Resolves the context's length, and the budget where it is automatic.
Status ModelSession::plan_memory(SessionOptions& options) {
  const std::string& path = catalog_.files.front()->path();
  const Result<ContextShape> shape = read_context_shape(path);
  if (!shape) return shape.error();
  if (options.context_tokens == 0) options.context_tokens = default_context_tokens(*shape);
  if (!catalog_.is_moe()) {
    if (options.ubatch_tokens == 0) options.ubatch_tokens = kUbatchTokens;
    return {};
  }

  const Result<SystemMemory> memory = read_system_memory();
  if (!memory && options.engine.budget.kind == BudgetSpec::Kind::kAuto) return memory.error();
  const BudgetInputs inputs = {
      .spec = options.engine.budget,
      .available_bytes = memory ? memory->available_bytes : kAvailableUnknown,
      .dense_bytes = catalog_.dense_bytes,
      .context_tokens = options.context_tokens,
      .context = estimate_context_bytes(*shape, options.context_tokens, options.ubatch_tokens),  // where it is given
      .expert_bytes = catalog_.expert_bytes,
      .budget_bytes_min = engine_budget_bytes_min(catalog_, options.engine.per_layer),
      .fit = options.engine.fit,
  };
  Result<BudgetPlan> plan = BudgetPlan{};
  if (options.ubatch_tokens > 0) {
    plan = plan_budget(inputs);
  } else {
    const Result<UbatchChoice> choice = choose_ubatch(inputs, *shape, options.batch_tokens);
    if (!choice) return choice.error();
    options.ubatch_tokens = choice->ubatch_tokens;
    plan = choice->plan;
    log_info("prompts are computed {} tokens at once", options.ubatch_tokens);
  }
  if (!plan) return plan.error();
  for (const std::string& line : budget_table(*plan)) log_info("{}", line);
  if (memory) log_info("memory is bound by: {}", memory->bound_by);
  if (plan->asked_bytes > 0) {
    log_warning("the budget of {} does not fit into memory: {} are taken (--fit off takes all of it)",
                format_bytes(plan->asked_bytes), format_bytes(plan->budget_bytes));
    options.engine.budget = {.kind = BudgetSpec::Kind::kBytes, .bytes = plan->budget_bytes};
  } else if (budget_exceeds_memory(*plan)) {
    log_warning("the budget of {} is more than the {} that free memory leaves for experts",
                format_bytes(plan->budget_bytes), format_bytes(plan->left_bytes));
  }
  if (options.engine.budget.kind == BudgetSpec::Kind::kAuto) {
    // Room for all is asked for as a share: the engine adds what alignment costs, which the bytes in the file leave
    // out.
    const bool all = plan->budget_bytes >= catalog_.expert_bytes;
    options.engine.budget = all ? BudgetSpec{.kind = BudgetSpec::Kind::kPercent, .percent = 100}
                                : BudgetSpec{.kind = BudgetSpec::Kind::kBytes, .bytes = plan->budget_bytes};
  }
  return {};
}

Status ModelSession::load_model(const SessionOptions& options) {
  engine_register_cpu_backend();
  llama_backend_init();
  llama_model_params params = llama_model_default_params();
  // A native pack's experts are computed by repacked kernels; the dense weights then go the same way, as in stock llama.cpp.
  const bool native = catalog_.pack && catalog_.pack->layout == PackLayout::kNative;
  params.use_extra_bufts = options.repack || native;
  params.lazy_mode = LLAMA_LAZY_MODE_OFF;
  params.progress_callback = loading_may_continue;

  LlamaErrorHold errors;
  const std::string& path = catalog_.files.front()->path();
  if (catalog_.is_moe()) {
    engine_set_options(options.engine);
    engine_set_catalog(catalog_);
    engine_register_backend();
    Result<std::FILE*> opened = open_model_stream(catalog_);
    if (!opened) return opened.error();
    const auto stream = own(*opened);
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    model_.reset(llama_model_load_from_file_ptr(stream.get(), params));
  } else {
    log_warning("dense model: no experts to stream");
    params.load_mode = LLAMA_LOAD_MODE_MMAP;
    model_.reset(llama_model_load_from_file(path.c_str(), params));
  }
  if (model_) return {};
  if (stop_requested()) return stopped_error();
  if (Status engine = engine_last_error(); !engine) return engine.error();
  return make_error(ErrorCode::kUnsupported, "cannot load '{}': {}", path, errors.first());
}

Status ModelSession::make_context(const SessionOptions& options) {
  const int threads_batch = options.threads_batch > 0 ? options.threads_batch : threads_;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.context_tokens;
  params.n_batch = options.batch_tokens;
  params.n_ubatch = options.ubatch_tokens;
  params.n_seq_max = 1;
  params.n_outputs_max = options.all_outputs ? options.batch_tokens : 1;  // else only a batch's last token is sampled from: no room for a row of logits per token
  params.n_threads = threads_;
  params.n_threads_batch = threads_batch;
  params.swa_full = false;
  params.abort_callback = stop_is_due;
  if (streaming() && options.engine.prefetch != PrefetchMode::kOff) params.cb_eval = engine_see_tensor;

  LlamaErrorHold errors;
  context_.reset(llama_init_from_model(model_.get(), params));
  if (!context_) {
    if (Status engine = engine_last_error(); !engine) return engine.error();
    return make_error(ErrorCode::kNoMemory, "no context of {} tokens for '{}': {}", options.context_tokens,
                      catalog_.files.front()->path(), errors.first());
  }

  if (options.all_outputs) wanted_outputs_.assign(batch_tokens(), 1);
  auto new_threadpool = [](int threads) {
    ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
    return ggml_threadpool_new(&pool);
  };
  threadpool_.reset(new_threadpool(threads_));
  if (threads_batch != threads_) threadpool_batch_.reset(new_threadpool(threads_batch));
  if (!threadpool_ || (threads_batch != threads_ && !threadpool_batch_)) {
    return make_error(ErrorCode::kNoMemory, "cannot start {} threads", std::max(threads_, threads_batch));
  }
  llama_attach_threadpool(context_.get(), threadpool_.get(), threadpool_batch_.get());
  if (streaming()) engine_set_threadpool(threadpool_.get());
  return {};
}

Status ModelSession::decode(const llama_token* tokens, size_t count) {
  SLUICE_ASSERT(count > 0 && count <= batch_tokens(), "{} tokens in a batch of {}", count, batch_tokens());
  LlamaErrorHold errors;
  // llama.cpp takes a pointer to mutable tokens and only reads them.
  llama_batch batch = llama_batch_get_one(const_cast<llama_token*>(tokens), static_cast<int32_t>(count));
  if (!wanted_outputs_.empty()) batch.logits = wanted_outputs_.data();
  const int32_t result = llama_decode(context_.get(), batch);
  if (result == 0) return {};
  if (stop_requested()) return stopped_error();
  if (streaming()) {
    if (Status engine = engine_last_error(); !engine) return engine.error();
  }
  if (result == 1) {
    return make_error(ErrorCode::kNoMemory, "the context of {} tokens is full", context_tokens());
  }
  return make_error(ErrorCode::kDeviceError, "llama_decode failed ({}): {}", result, errors.first());
}

}  // namespace sluice
