// sluice in ggml's terms: registry, device, buffer type, buffer and backend, bottom up. Every function here is a
// callback that ggml calls; what they do is decided in backend/streamed_model.h and moe/. No exception leaves one.
//
// How llama.cpp meets it (its loader and ggml's scheduler, as of ggml 0.25):
//   - The device is of type ACCEL with a buffer type of its own, so the loader offers it every weight first; supports_op
//     takes the routed experts' MUL_MAT_ID (and ADD_ID of their biases), so those tensors land in our buffers.
//   - The buffer is not "host": tensors reach it by a mapping (buffer_from_host_ptr), by set_tensor, or by the
//     asynchronous upload, which is why events and a host buffer type exist. Expert bytes are not stored.
//   - The scheduler extends a split over neighbours that supports_op accepts, so a whole MoE block arrives as one graph.
//   - Results of our split live in our buffers, which are ordinary memory for everything that is not an expert.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>

#include "backend/registry.h"
#include "backend/streamed_model.h"
#include "base/log.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-sluice.h"
#include "moe/block_executor.h"
#include "moe/moe_block.h"

namespace sluice {
namespace {

constexpr char kName[] = "SLUICE";
constexpr size_t kAlignment = 64;

ggml_backend_buffer_type_t sluice_buffer_type();
ggml_backend_dev_t sluice_device();

bool is_our_buffer(const ggml_backend_buffer* buffer) { return buffer != nullptr && buffer->buft == sluice_buffer_type(); }

// ---------------------------------------------------------------------------------------------------------- buffer

struct Buffer {
  std::byte* base = nullptr;
  size_t bytes = 0;
  bool owned = false;  // our address space; otherwise a mapping of llama.cpp's
  std::vector<std::shared_ptr<StreamedModel>> models;  // that have tensors here
};

StreamedTensor* streamed(const ggml_tensor* tensor) { return static_cast<StreamedTensor*>(tensor->extra); }

std::byte* memory_of(const ggml_tensor* tensor) { return static_cast<std::byte*>(tensor->data); }

void buffer_free(ggml_backend_buffer_t buffer) {
  auto* self = static_cast<Buffer*>(buffer->context);
  if (self->owned) munmap(self->base, self->bytes);
  delete self;
}

void* buffer_get_base(ggml_backend_buffer_t buffer) { return static_cast<Buffer*>(buffer->context)->base; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  auto* self = static_cast<Buffer*>(buffer->context);
  if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS;
  tensor->extra = nullptr;
  const auto name = parse_expert_tensor_name(tensor->name);
  if (!name || tensor->op != GGML_OP_NONE) return GGML_STATUS_SUCCESS;
  std::shared_ptr<StreamedModel> model = Registry::instance().model_for(*name);
  tensor->extra = model->add_tensor(tensor, *name, !self->owned);
  if (self->models.empty() || self->models.back() != model) self->models.push_back(std::move(model));
  return GGML_STATUS_SUCCESS;
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) {
  if (tensor->extra != nullptr) {
    log_warning_once("{}: memset of a streamed tensor is ignored", tensor->name);
    return;
  }
  std::memset(memory_of(tensor) + offset, value, size);
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  if (StreamedTensor* description = streamed(tensor)) {
    auto* model = static_cast<StreamedModel*>(description->owner);
    model->receive(*description, tensor, data, offset, size, memory_of(tensor));
    return;
  }
  std::memcpy(memory_of(tensor) + offset, data, size);
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset, size_t size) {
  if (const StreamedTensor* description = streamed(tensor)) {
    const auto* model = static_cast<const StreamedModel*>(description->owner);
    if (Status status = model->read(*description, memory_of(tensor), offset, data, size); !status) {
      // ggml gives this callback no way to fail, and wrong weights are not an option.
      log_error("{}: {}", tensor->name, status.error().message());
      std::terminate();
    }
    return;
  }
  std::memcpy(data, memory_of(tensor) + offset, size);
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
  const auto* self = static_cast<Buffer*>(buffer->context);
  if (self->owned && self->models.empty()) std::memset(self->base, value, self->bytes);
}

constexpr ggml_backend_buffer_i kBufferInterface = {
    .free_buffer = buffer_free,
    .get_base = buffer_get_base,
    .init_tensor = buffer_init_tensor,
    .memset_tensor = buffer_memset_tensor,
    .set_tensor = buffer_set_tensor,
    .get_tensor = buffer_get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor = nullptr,
    .clear = buffer_clear,
    .reset = nullptr,
};

// ----------------------------------------------------------------------------------------------------- buffer type

const char* buffer_type_get_name(ggml_backend_buffer_type_t) { return kName; }

// Address space for everything; pages come when something is written, which for streamed experts is never.
ggml_backend_buffer_t buffer_type_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  const size_t bytes = std::max<size_t>(size, 1);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    log_error("no address space for a buffer of {}", format_bytes(size));
    return nullptr;
  }
  auto* self = new Buffer{.base = static_cast<std::byte*>(base), .bytes = bytes, .owned = true, .models = {}};
  return ggml_backend_buffer_init(type, kBufferInterface, self, size);
}

size_t buffer_type_get_alignment(ggml_backend_buffer_type_t) { return kAlignment; }
bool buffer_type_is_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_type_t sluice_buffer_type() {
  static ggml_backend_buffer_type type = {
      .iface =
          {
              .get_name = buffer_type_get_name,
              .alloc_buffer = buffer_type_alloc_buffer,
              .get_alignment = buffer_type_get_alignment,
              .get_max_size = nullptr,
              .get_alloc_size = nullptr,
              .is_host = buffer_type_is_host,
          },
      .device = sluice_device(),
      .context = nullptr,
  };
  return &type;
}

// --------------------------------------------------------------------------------------------------------- backend

struct Backend {
  std::unique_ptr<BlockExecutor> executor;
  ggml_threadpool_t threadpool = nullptr;
  MoeBlock block;
  Routing routing;
  std::vector<ggml_tensor*> nodes;
  std::vector<ggml_tensor*> plain;  // nodes before the next block
};

const char* backend_get_name(ggml_backend_t) { return kName; }

void backend_free(ggml_backend_t backend) {
  delete static_cast<Backend*>(backend->context);
  delete backend;
}

void backend_set_tensor_async(ggml_backend_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  ggml_backend_tensor_set(tensor, data, offset, size);
}

void backend_get_tensor_async(ggml_backend_t, const ggml_tensor* tensor, void* data, size_t offset, size_t size) {
  ggml_backend_tensor_get(tensor, data, offset, size);
}

// Everything is done when a call returns, so there is nothing to wait for and an event has always happened.
void backend_synchronize(ggml_backend_t) {}
void backend_event_record(ggml_backend_t, ggml_backend_event_t) {}
void backend_event_wait(ggml_backend_t, ggml_backend_event_t) {}

// The weight of a MUL_MAT_ID in one of our buffers. A tensor that is no model's expert (a test's) lies there as it is.
const ExpertWeight* expert_weight(const ggml_tensor* weight) {
  if (!is_our_buffer(weight->buffer)) return nullptr;
  return static_cast<const ExpertWeight*>(streamed(weight));
}

bool is_plain_weight(const ggml_tensor* weight) { return is_our_buffer(weight->buffer) && weight->extra == nullptr; }

// A lone MUL_MAT_ID whose weight is ordinary memory.
Status compute_plain_block(Backend& self, ggml_tensor* node) {
  const ggml_tensor* weight = node->src[0];
  const ExpertWeight description{.role = MatrixRole::kDown, .resident = memory_of(weight)};
  MoeBlock& block = self.block;
  block = {.ids = node->src[2], .x = node->src[1], .first = {}, .middle = {}, .outside = {}, .down = node, .weight = &description};
  if (Status status = self.routing.set(block.ids, static_cast<uint32_t>(weight->ne[2])); !status) return status;
  if (Status status = self.executor->begin_block(block, self.routing); !status) return status;
  std::vector<ReadyExpert> experts(self.routing.experts().size());
  for (uint32_t i = 0; i < experts.size(); ++i) {
    experts[i].index = i;
    experts[i].slab[static_cast<size_t>(description.role)] = description.resident + self.routing.experts()[i] * weight->nb[2];
  }
  return self.executor->compute(experts);
}

Status compute_graph(Backend& self, ggml_cgraph* graph) {
  if (ggml_threadpool_t threadpool = Registry::instance().threadpool(); threadpool != self.threadpool) {
    self.executor->set_threadpool(threadpool);
    self.threadpool = threadpool;
  }
  self.nodes.assign(ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph));
  self.plain.clear();
  const auto flush_plain = [&]() -> Status {
    if (self.plain.empty()) return {};
    Status status = self.executor->compute_nodes(self.plain);
    self.plain.clear();
    return status;
  };
  int at = 0;
  while (at < static_cast<int>(self.nodes.size())) {
    ggml_tensor* node = self.nodes[static_cast<size_t>(at)];
    const bool is_product = node->op == GGML_OP_MUL_MAT_ID && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !ggml_is_empty(node);
    const ExpertWeight* weight = is_product ? expert_weight(node->src[0]) : nullptr;
    if (weight == nullptr && !(is_product && is_plain_weight(node->src[0]))) {
      self.plain.push_back(node);
      ++at;
      continue;
    }
    if (Status status = flush_plain(); !status) return status;
    if (weight == nullptr) {
      if (Status status = compute_plain_block(self, node); !status) return status;
      ++at;
      continue;
    }
    find_moe_block(self.nodes, at, expert_weight, self.block);
    auto* model = static_cast<StreamedModel*>(weight->owner);
    if (Status status = model->finish(); !status) return status;
    if (Status status = model->compute_block(self.block, self.routing, *self.executor); !status) return status;
    at = self.block.end_node;
  }
  return flush_plain();
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    const Status status = compute_graph(*static_cast<Backend*>(backend->context), graph);
    if (status.ok()) return GGML_STATUS_SUCCESS;
    Registry::instance().set_last_error(status);
    if (status.error().code == ErrorCode::kCancelled) return GGML_STATUS_ABORTED;
    log_error("{}", status.error().message());
    return status.error().code == ErrorCode::kNoMemory ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
  } catch (const std::exception& exception) {
    log_error("computation failed: {}", exception.what());
    return GGML_STATUS_FAILED;
  }
}

constexpr ggml_backend_i kBackendInterface = {
    .get_name = backend_get_name,
    .free = backend_free,
    .set_tensor_async = backend_set_tensor_async,
    .get_tensor_async = backend_get_tensor_async,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async = nullptr,
    .synchronize = backend_synchronize,
    .graph_plan_create = nullptr,
    .graph_plan_free = nullptr,
    .graph_plan_update = nullptr,
    .graph_plan_compute = nullptr,
    .graph_compute = backend_graph_compute,
    .event_record = backend_event_record,
    .event_wait = backend_event_wait,
    .graph_optimize = nullptr,
};

ggml_guid_t backend_guid() {
  static ggml_guid guid = {0x73, 0x6c, 0x75, 0x69, 0x63, 0x65, 0x4d, 0x6f, 0x45, 0x9a, 0x01, 0xd7, 0x3c, 0x5e, 0xb2, 0x48};
  return &guid;
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) {
  static_cast<Backend*>(backend->context)->executor->set_threads(n_threads);
}

void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  static_cast<Backend*>(backend->context)->executor->set_abort_callback(callback, data);
}

// ---------------------------------------------------------------------------------------------------------- device

const char* device_get_name(ggml_backend_dev_t) { return kName; }
const char* device_get_description(ggml_backend_dev_t) { return "routed experts streamed from storage"; }

void device_get_memory(ggml_backend_dev_t, size_t* free, size_t* total) {
  *free = 0;
  *total = 0;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_get_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_get_name(device);
  props->description = device_get_description(device);
  props->type = device_get_type(device);
  device_get_memory(device, &props->memory_free, &props->memory_total);
  // async, host_buffer and events: the loader then hands tensors over in pieces instead of staging each of them whole.
  props->caps.async = true;
  props->caps.host_buffer = true;
  props->caps.buffer_from_host_ptr = true;
  props->caps.events = true;
  props->caps.mmap_support = true;
}

// Called for each context, when all of a model's tensors are there, and by the loader for uploads, when they are not.
ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char*) {
  if (Status status = Registry::instance().finish_models(); !status) {
    Registry::instance().set_last_error(status);
    log_line_once(LogLevel::kError, status.error().message());
    return nullptr;
  }
  auto executor = BlockExecutor::create();
  if (!executor) {
    log_error("{}", executor.error().message());
    return nullptr;
  }
  auto* self = new Backend;
  self->executor = std::move(executor).value();
  return new ggml_backend{.guid = backend_guid(), .iface = kBackendInterface, .device = device, .context = self};
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t) { return sluice_buffer_type(); }
ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }

ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t, void* data, size_t size, size_t) {
  auto* self = new Buffer{.base = static_cast<std::byte*>(data), .bytes = size, .owned = false, .models = {}};
  return ggml_backend_buffer_init(sluice_buffer_type(), kBufferInterface, self, size);
}

// A weight that may be ours: in one of our buffers, or in none yet (llama.cpp asks before it allocates, with the
// tensor's real name). Other tensors of a model that go through MUL_MAT_ID stay where llama.cpp puts them.
bool is_acceptable_weight(const ggml_tensor* weight) {
  if (weight->buffer != nullptr && !is_our_buffer(weight->buffer)) return false;
  if (weight->view_src != nullptr || !ggml_is_contiguous(weight) || weight->ne[3] != 1) return false;
  const std::string_view name = weight->name;
  return parse_expert_tensor_name(name).has_value() || !name.starts_with("blk.");
}

bool is_supported_product(const ggml_tensor* op) {
  const ggml_tensor* weight = op->src[0];
  const ggml_tensor* x = op->src[1];
  const ggml_tensor* ids = op->src[2];
  if (!is_acceptable_weight(weight)) return false;
  const ggml_type_traits_cpu* traits = ggml_get_type_traits_cpu(weight->type);
  if (traits->vec_dot == nullptr) return false;
  if (ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float == nullptr) return false;
  return x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[3] == 1 && ids->type == GGML_TYPE_I32 &&
         op->type == GGML_TYPE_F32 && op->nb[0] == sizeof(float);
}

// The product of ours that a value is computed from by row-local operations; looks at `visits` tensors at most.
const ggml_tensor* find_product(const ggml_tensor* tensor, int& visits) {
  if (tensor == nullptr || --visits < 0) return nullptr;
  if (tensor->op == GGML_OP_MUL_MAT_ID) return is_our_buffer(tensor->src[0]->buffer) ? tensor : nullptr;
  if (tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_RESHAPE) return find_product(tensor->src[0], visits);
  if (!is_row_local(tensor)) return nullptr;
  const ggml_tensor* product = find_product(tensor->src[0], visits);
  if (product == nullptr) product = find_product(tensor->src[1], visits);
  // A norm only inside the block: the one that follows a layer's sum, and all behind it, is not ours.
  const bool inside = product != nullptr && tensor->ne[1] == product->ne[1] && tensor->ne[2] == product->ne[2];
  return is_elementwise(tensor) || inside ? product : nullptr;
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    case GGML_OP_MUL_MAT_ID: return is_supported_product(op);
    case GGML_OP_ADD_ID:
      // The loader's question about a bias: it then lies, resident, beside the experts it belongs to.
      if (is_expert_side_tensor_name(op->src[1]->name) && (op->src[1]->buffer == nullptr || is_our_buffer(op->src[1]->buffer))) {
        return op->type == GGML_TYPE_F32 && op->src[0]->type == GGML_TYPE_F32 && op->src[1]->type == GGML_TYPE_F32;
      }
      break;
    default: break;
  }
  constexpr int kVisitsMax = 80;  // a sum over 64 choices and what surrounds it
  int visits = kVisitsMax;
  return is_row_local(op) && op->type == GGML_TYPE_F32 && find_product(op, visits) != nullptr;
}

bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return type == sluice_buffer_type() || ggml_backend_buft_is_host(type);
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t device) { return new ggml_backend_event{.device = device, .context = nullptr}; }
void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }
void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

constexpr ggml_backend_device_i kDeviceInterface = {
    .get_name = device_get_name,
    .get_description = device_get_description,
    .get_memory = device_get_memory,
    .get_type = device_get_type,
    .get_props = device_get_props,
    .init_backend = device_init_backend,
    .get_buffer_type = device_get_buffer_type,
    .get_host_buffer_type = device_get_host_buffer_type,
    .buffer_from_host_ptr = device_buffer_from_host_ptr,
    .supports_op = device_supports_op,
    .supports_buft = device_supports_buft,
    .offload_op = nullptr,
    .event_new = device_event_new,
    .event_free = device_event_free,
    .event_synchronize = device_event_synchronize,
};

ggml_backend_dev_t sluice_device() {
  static ggml_backend_device device = {.iface = kDeviceInterface, .reg = ggml_backend_sluice_reg(), .context = nullptr};
  return &device;
}

// -------------------------------------------------------------------------------------------------------- registry

const char* reg_get_name(ggml_backend_reg_t) { return kName; }
size_t reg_get_device_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t) { return sluice_device(); }

void* reg_get_proc_address(ggml_backend_reg_t, const char* name) {
  const std::string_view wanted = name;
  if (wanted == "ggml_backend_set_n_threads") return reinterpret_cast<void*>(backend_set_n_threads);
  if (wanted == "ggml_backend_set_abort_callback") return reinterpret_cast<void*>(backend_set_abort_callback);
  if (wanted == "ggml_backend_sluice_set_option") return reinterpret_cast<void*>(ggml_backend_sluice_set_option);
  if (wanted == "ggml_backend_sluice_get_stats") return reinterpret_cast<void*>(ggml_backend_sluice_get_stats);
  return nullptr;
}

}  // namespace
}  // namespace sluice

ggml_backend_reg_t ggml_backend_sluice_reg(void) {
  static ggml_backend_reg reg = {
      .api_version = GGML_BACKEND_API_VERSION,
      .iface =
          {
              .get_name = sluice::reg_get_name,
              .get_device_count = sluice::reg_get_device_count,
              .get_device = sluice::reg_get_device,
              .get_proc_address = sluice::reg_get_proc_address,
          },
      .context = nullptr,
  };
  return &reg;
}
