#include "moe/generic_executor.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "moe/native_layout.h"

namespace sluice {

namespace {

// Of a group's graph: eight experts with a middle of the greatest length, operands included.
constexpr size_t kGroupExpertsMax = 8;
constexpr uint32_t kGroupRowsMax = 1024;
constexpr size_t kGraphNodesMax = 1024;

}  // namespace

// Builds one graph whose tensors get their places afterwards, from the graph allocator.
struct GenericExecutor::Group : TwinGraph {
  explicit Group(GenericExecutor& executor)
      : TwinGraph(ggml_init({.mem_size = executor.graph_memory_.size(),
                             .mem_buffer = executor.graph_memory_.data(),
                             .no_alloc = true})),
        self(executor) {
    graph = ggml_new_graph_custom(ctx(), kGraphNodesMax, false);
  }
  ~Group() override { ggml_free(ctx()); }

  ggml_tensor* new_result(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) override {
    return ggml_new_tensor_3d(ctx(), type, ne0, ne1, ne2);
  }
  ggml_tensor* new_operand(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void* data) override {
    ggml_tensor* operand = ggml_new_tensor_3d(ctx(), type, ne0, ne1, ne2);
    ggml_set_input(operand);
    self.contents_.push_back({operand, data});
    return operand;
  }
  ggml_tensor* side_weight(ggml_tensor* weight) override {
    return self.wraps_ ? weight : new_operand(weight->type, weight->ne[0], weight->ne[1], weight->ne[2], weight->data);
  }
  void add(ggml_tensor*) override {}  // everything is reached from the results

  GenericExecutor& self;
  ggml_cgraph* graph = nullptr;
};

Result<std::unique_ptr<GenericExecutor>> GenericExecutor::create(ggml_backend_t backend) {
  std::unique_ptr<GenericExecutor> executor(new GenericExecutor);
  executor->cpu_.reset(ggml_backend_cpu_init());
  if (!executor->cpu_) return make_error(ErrorCode::kUnsupported, "ggml's CPU backend does not start");
  executor->backend_ = backend != nullptr ? backend : executor->cpu_.get();
  ggml_backend_dev_props props;
  ggml_backend_dev_get_props(ggml_backend_get_device(executor->backend_), &props);
  ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(executor->backend_);
  executor->wraps_ = props.caps.buffer_from_host_ptr && ggml_backend_buft_is_host(type);
  executor->allocator_.reset(ggml_gallocr_new(type));
  executor->graph_memory_.resize(ggml_graph_overhead_custom(kGraphNodesMax, false) +
                                 2 * kGraphNodesMax * ggml_tensor_overhead());
  return executor;
}

Status GenericExecutor::run(ggml_backend_t backend, ggml_cgraph* graph) const {
  switch (ggml_backend_graph_compute(backend, graph)) {
    case GGML_STATUS_SUCCESS: return {};
    case GGML_STATUS_ABORTED: return make_error(ErrorCode::kCancelled, "computation stopped on request");
    case GGML_STATUS_ALLOC_FAILED:
      return make_error(ErrorCode::kNoMemory, "ggml's backend {} found no memory for its work",
                        ggml_backend_name(backend));
    default:
      return make_error(ErrorCode::kUnsupported, "ggml's backend {} refused a graph", ggml_backend_name(backend));
  }
}

Status GenericExecutor::compute_nodes(std::span<ggml_tensor* const> nodes) {
  while (!nodes.empty()) {
    const size_t n = std::min(nodes.size(), kGraphNodesMax);
    Group group(*this);
    for (ggml_tensor* node : nodes.first(n)) ggml_graph_add_node(group.graph, node);
    if (Status status = run(cpu_.get(), group.graph); !status) return status;
    nodes = nodes.subspan(n);
  }
  return {};
}

Status GenericExecutor::begin_block(const MoeBlock& block, const Routing& routing) {
  ++(block.first.empty() ? counters_.lone_blocks : counters_.generic_blocks);
  block_ = &block;
  routing_ = &routing;
  n_expert_left_ = routing.experts().size();
  block_arena_.reset();
  const ggml_tensor* x = block.x;
  auto* input = block_arena_.take_array<float>(static_cast<uint64_t>(ggml_nelements(x)));
  input_ = input;
  for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
    for (int64_t i1 = 0; i1 < x->ne[1]; ++i1) {
      const char* from =
          static_cast<const char*>(x->data) + i2 * static_cast<int64_t>(x->nb[2]) + i1 * static_cast<int64_t>(x->nb[1]);
      std::memcpy(input, from, static_cast<size_t>(x->ne[0]) * sizeof(float));
      input += x->ne[0];
    }
  }
  return operands_.copy(block, block_arena_, *this);
}

Status GenericExecutor::compute(std::span<const ReadyExpert> experts) {
  while (!experts.empty()) {
    size_t n = 0;
    size_t n_row = 0;
    do {
      n_row += routing_->rows(experts[n].index).size();
      ++n;
    } while (n < experts.size() && n < kGroupExpertsMax &&
             n_row + routing_->rows(experts[n].index).size() <= kGroupRowsMax);
    if (Status status = compute_group(experts.first(n)); !status) return status;
    experts = experts.subspan(n);
  }
  return {};
}

// One expert's matrix as a tensor that the backend can read.
Result<ggml_tensor*> GenericExecutor::matrix(Group& group, const ggml_tensor* weight, const ExpertWeight& description,
                                             const std::byte* slab) {
  if (!wraps_) {
    if (description.native != nullptr) {
      return make_error(ErrorCode::kUnsupported, "{}: experts in the CPU's native layout are not for backend {}",
                        weight->name, ggml_backend_name(backend_));
    }
    ggml_tensor* uploaded = group.new_operand(weight->type, weight->ne[0], weight->ne[1], 1, slab);
    uploaded_bytes_ += ggml_nbytes(uploaded);
    return uploaded;
  }
  ggml_tensor* matrix = ggml_new_tensor_3d(group.ctx(), weight->type, weight->ne[0], weight->ne[1], 1);
  std::byte* address = const_cast<std::byte*>(slab);  // a buffer's memory is writable by type; nothing writes here
  if (description.native != nullptr) {
    matrix->data = address;
    const bool native = description.native->make_native(matrix);
    SLUICE_ASSERT(native, "{}: no native layout", weight->name);
    return matrix;
  }
  // A buffer starts at a multiple of the backend's alignment; a slab may lie a little behind one.
  const uint64_t skip = reinterpret_cast<uintptr_t>(slab) % ggml_backend_get_alignment(backend_);
  const uint64_t bytes = skip + ggml_nbytes(matrix);
  wrapped_.emplace_back(
      ggml_backend_dev_buffer_from_host_ptr(ggml_backend_get_device(backend_), address - skip, bytes, bytes));
  if (!wrapped_.back() || ggml_backend_tensor_alloc(wrapped_.back().get(), matrix, address) != GGML_STATUS_SUCCESS) {
    return make_error(ErrorCode::kNoMemory, "{}: backend {} does not take a matrix of {} bytes", weight->name,
                      ggml_backend_name(backend_), ggml_nbytes(matrix));
  }
  return matrix;
}

Status GenericExecutor::add_expert(Group& group, const ReadyExpert& expert) {
  const auto rows = routing_->rows(expert.index);
  const auto n_row = static_cast<int64_t>(rows.size());
  const ggml_tensor* x = block_->x;
  auto* input = group_arena_.take_array<float>(rows.size() * static_cast<uint64_t>(x->ne[0]));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = (rows[i] / routing_->top_k()) * x->ne[1] + (rows[i] % routing_->top_k()) % x->ne[1];
    std::memcpy(input + static_cast<int64_t>(i) * x->ne[0], input_ + row * x->ne[0],
                static_cast<size_t>(x->ne[0]) * sizeof(float));
  }
  auto* zeros = group_arena_.take_array<int32_t>(rows.size());
  std::fill_n(zeros, rows.size(), 0);
  ggml_tensor* ids = group.new_operand(GGML_TYPE_I32, 1, n_row, 1, zeros);
  const auto product = [&](const ggml_tensor* node, const ExpertWeight& description,
                           ggml_tensor* in) -> Result<ggml_tensor*> {
    auto weight = matrix(group, node->src[0], description, expert.slab[static_cast<size_t>(description.role)]);
    if (!weight) return weight;
    ggml_tensor* result = ggml_mul_mat_id(group.ctx(), *weight, in, ids);
    std::memcpy(result->op_params, node->op_params, sizeof(result->op_params));
    return result;
  };

  group.clear_twins();
  ggml_tensor* in = group.new_operand(GGML_TYPE_F32, x->ne[0], 1, n_row, input);
  for (const ggml_tensor* node : block_->first) {
    auto result = product(node, *static_cast<const ExpertWeight*>(node->src[0]->extra), in);
    if (!result) return result.error();
    group.set_twin(node, *result);
  }
  if (!block_->first.empty()) in = build_middle(*block_, *routing_, operands_, rows, group_arena_, group);
  auto down = product(block_->down, *block_->weight, in);
  if (!down) return down.error();
  ggml_set_output(*down);
  ggml_build_forward_expand(group.graph, *down);
  results_.push_back(*down);
  return {};
}

Status GenericExecutor::compute_group(std::span<const ReadyExpert> experts) {
  group_arena_.reset();
  contents_.clear();
  results_.clear();
  wrapped_.clear();
  {
    Group group(*this);
    for (const ReadyExpert& expert : experts) {
      if (Status status = add_expert(group, expert); !status) return status;
    }
    for (int i = 0; i < ggml_graph_n_nodes(group.graph); ++i) {
      const ggml_tensor* node = ggml_graph_node(group.graph, i);
      // A native matrix was taken by its layout; ggml's own answer is about tensors of several.
      const bool native = node->op == GGML_OP_MUL_MAT_ID && node->src[0]->extra != nullptr;
      if (native || ggml_backend_supports_op(backend_, node)) continue;
      return make_error(ErrorCode::kUnsupported, "backend {} has no {} of type {}", ggml_backend_name(backend_),
                        ggml_op_name(node->op), ggml_type_name(node->src[0]->type));
    }
    if (!ggml_gallocr_alloc_graph(allocator_.get(), group.graph)) {
      return make_error(ErrorCode::kNoMemory, "backend {} has no memory for {} experts", ggml_backend_name(backend_),
                        experts.size());
    }
    for (const Contents& contents : contents_) {
      // An operand that no operation reads has no place.
      if (contents.tensor->buffer != nullptr)
        ggml_backend_tensor_set(contents.tensor, contents.data, 0, ggml_nbytes(contents.tensor));
    }
    if (Status status = run(backend_, group.graph); !status) return status;

    const int64_t begin_ns = now_ns();
    const uint64_t row_bytes = static_cast<uint64_t>(block_->down->ne[0]) * sizeof(float);
    for (size_t e = 0; e < experts.size(); ++e) {
      const auto rows = routing_->rows(experts[e].index);
      rows_.resize(rows.size() * static_cast<size_t>(block_->down->ne[0]));
      ggml_backend_tensor_get(results_[e], rows_.data(), 0, rows.size() * row_bytes);
      for (size_t i = 0; i < rows.size(); ++i) {
        char* to = static_cast<char*>(block_->down->data) + (rows[i] % routing_->top_k()) * block_->down->nb[1] +
                   (rows[i] / routing_->top_k()) * block_->down->nb[2];
        std::memcpy(to, rows_.data() + i * static_cast<size_t>(block_->down->ne[0]), row_bytes);
      }
    }
    counters_.scatter_ns += now_ns() - begin_ns;
  }
  SLUICE_ASSERT(experts.size() <= n_expert_left_, "{} experts computed, {} were left", experts.size(), n_expert_left_);
  n_expert_left_ -= experts.size();
  if (n_expert_left_ > 0 || block_->sum == nullptr) return {};
  const int64_t begin_ns = now_ns();
  Status status = compute_nodes(block_->sum_nodes);
  counters_.scatter_ns += now_ns() - begin_ns;
  return status;
}

}  // namespace sluice
