#include "moe/fused_executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "base/clock.h"
#include "moe/native_layout.h"

namespace sluice {

namespace {

constexpr size_t kGraphNodesMax = 160;
constexpr size_t kConvertedMax = 4;    // different types that the first matrices of a block may want their input in
// A group is one graph: large enough to hide its start, small enough that reads are looked after in between.
constexpr size_t kGroupExpertsMax = 32;
constexpr uint32_t kGroupRowsMax = 1024;
constexpr uint64_t kChunkBytes = 32 * kKiB;  // of weights: long enough to hide the counter, short enough to balance
constexpr int64_t kChunkRowsMin = 16;        // a cache line of results, so that threads do not share one

uint64_t row_bytes(ggml_type type, int64_t n) { return ggml_row_size(type, n); }

// What the products of a matrix want their input rows as. Repacked kernels convert by themselves.
ggml_type input_type(const ggml_tensor* weight, const ExpertWeight& description) {
  return description.native != nullptr ? GGML_TYPE_F32 : ggml_get_type_traits_cpu(weight->type)->vec_dot_type;
}

const ExpertWeight& description_of(const ggml_tensor* weight) { return *static_cast<const ExpertWeight*>(weight->extra); }

// Rows of floats to rows of another type.
struct ConvertTask {
  const std::byte* from = nullptr;
  int64_t n_row = 0;
  int64_t n_inner = 0;          // rows per outer step
  uint64_t inner_stride = 0;
  uint64_t outer_stride = 0;
  std::byte* to = nullptr;
  uint64_t to_row_bytes = 0;
  int64_t n = 0;
  ggml_from_float_t convert = nullptr;
};

void run_convert(ggml_tensor*, int ith, int nth, void* data) {
  const auto& task = *static_cast<const ConvertTask*>(data);
  const int64_t begin = task.n_row * ith / nth;
  const int64_t end = task.n_row * (ith + 1) / nth;
  for (int64_t row = begin; row < end; ++row) {
    const std::byte* from = task.from + static_cast<uint64_t>(row / task.n_inner) * task.outer_stride +
                            static_cast<uint64_t>(row % task.n_inner) * task.inner_stride;
    task.convert(reinterpret_cast<const float*>(from), task.to + static_cast<uint64_t>(row) * task.to_row_bytes, task.n);
  }
}

// The time that a node takes, measured by its first thread; the others have equal shares. Counts nothing without a total.
class NodeTimer {
 public:
  NodeTimer(int ith, int64_t* total_ns) : total_ns_(ith == 0 ? total_ns : nullptr), begin_ns_(total_ns_ != nullptr ? now_ns() : 0) {}
  ~NodeTimer() {
    if (total_ns_ != nullptr) *total_ns_ += now_ns() - begin_ns_;
  }
  NodeTimer(const NodeTimer&) = delete;

 private:
  int64_t* total_ns_;
  int64_t begin_ns_;
};

// Whole rows, each from a place of its own to a place of its own.
struct CopyRowsTask {
  const std::byte** from = nullptr;
  std::byte** to = nullptr;
  int64_t n_row = 0;
  uint64_t bytes = 0;
  int64_t* total_ns = nullptr;
};

void run_copy_rows(ggml_tensor*, int ith, int nth, void* data) {
  const auto& task = *static_cast<const CopyRowsTask*>(data);
  const NodeTimer timer(ith, task.total_ns);
  const int64_t begin = task.n_row * ith / nth;
  const int64_t end = task.n_row * (ith + 1) / nth;
  for (int64_t row = begin; row < end; ++row) std::memcpy(task.to[row], task.from[row], task.bytes);
}

// For every token the sum over its choices, each row with its bias and weight.
struct SumTask {
  const std::byte* rows = nullptr;  // [n_token][top_k] rows of n floats
  uint64_t choice_stride = 0;
  uint64_t token_stride = 0;
  const std::byte* bias = nullptr;  // by expert; null: none
  uint64_t bias_stride = 0;
  const float* weights = nullptr;   // [n_token][top_k]; null: none
  const int32_t* ids = nullptr;     // [n_token][top_k]
  int64_t top_k = 0;
  int64_t n_token = 0;
  int64_t n = 0;
  std::byte* out = nullptr;         // [n_token] rows
  uint64_t out_stride = 0;
  int64_t* total_ns = nullptr;
};

constexpr int64_t kSumColumns = 256;  // of one row at a time: results stay in the first cache

void sum_columns(const SumTask& task, int64_t token, int64_t begin, int64_t end) {
  float* out = reinterpret_cast<float*>(task.out + static_cast<uint64_t>(token) * task.out_stride);
  for (int64_t choice = 0; choice < task.top_k; ++choice) {
    const int64_t row = token * task.top_k + choice;
    const float* values = reinterpret_cast<const float*>(task.rows + static_cast<uint64_t>(token) * task.token_stride +
                                                         static_cast<uint64_t>(choice) * task.choice_stride);
    std::array<float, kSumColumns> terms;
    const int64_t n = end - begin;
    std::copy_n(values + begin, n, terms.begin());
    if (task.bias != nullptr) {
      const float* bias = reinterpret_cast<const float*>(task.bias + static_cast<uint64_t>(task.ids[row]) * task.bias_stride);
      for (int64_t i = 0; i < n; ++i) terms[static_cast<size_t>(i)] += bias[begin + i];
    }
    if (task.weights != nullptr) {
      for (int64_t i = 0; i < n; ++i) terms[static_cast<size_t>(i)] *= task.weights[row];
    }
    if (choice == 0) {
      std::copy_n(terms.begin(), n, out + begin);
    } else {
      for (int64_t i = 0; i < n; ++i) out[begin + i] += terms[static_cast<size_t>(i)];
    }
  }
}

void run_sum(ggml_tensor*, int ith, int nth, void* data) {
  const auto& task = *static_cast<const SumTask*>(data);
  const NodeTimer timer(ith, task.total_ns);
  const int64_t n_piece = (task.n + kSumColumns - 1) / kSumColumns;
  const int64_t n_total = task.n_token * n_piece;
  for (int64_t piece = n_total * ith / nth; piece < n_total * (ith + 1) / nth; ++piece) {
    const int64_t begin = piece % n_piece * kSumColumns;
    sum_columns(task, piece / n_piece, begin, std::min(begin + kSumColumns, task.n));
  }
}

// One matrix of one expert times its few rows.
struct Product {
  const std::byte* weight = nullptr;  // [n_out] rows of weight_row_bytes
  uint64_t weight_row_bytes = 0;
  int64_t n_in = 0;
  int64_t n_out = 0;
  ggml_vec_dot_t dot = nullptr;
  uint32_t n_row = 0;
  const std::byte** in = nullptr;  // [n_row]
  float** out = nullptr;           // [n_row]
  int64_t chunk_rows = 0;
  int64_t first_chunk = 0;         // running number over all products of the task
};

struct ProductsTask {
  Product* products = nullptr;
  size_t n_product = 0;
  int64_t n_chunk = 0;
  std::atomic<int64_t> next_chunk{0};
};

void run_products(ggml_tensor*, int ith, int, void* data) {
  (void)ith;
  auto& task = *static_cast<ProductsTask*>(data);
  const Product* products = task.products;
  size_t at = 0;
  for (;;) {
    const int64_t chunk = task.next_chunk.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= task.n_chunk) return;
    while (at + 1 < task.n_product && products[at + 1].first_chunk <= chunk) ++at;
    const Product& product = products[at];
    const int64_t begin = (chunk - product.first_chunk) * product.chunk_rows;
    const int64_t end = std::min(begin + product.chunk_rows, product.n_out);
    const int n_in = static_cast<int>(product.n_in);
    for (int64_t out = begin; out < end; ++out) {
      const std::byte* weight = product.weight + static_cast<uint64_t>(out) * product.weight_row_bytes;
      for (uint32_t row = 0; row < product.n_row; ++row) {
        product.dot(n_in, product.out[row] + out, 0, weight, 0, product.in[row], 0, 1);
      }
    }
  }
}

ggml_context* context_over(std::vector<uint8_t>& memory) {
  return ggml_init({.mem_size = memory.size(), .mem_buffer = memory.data(), .no_alloc = true});
}

}  // namespace

// Builds one small graph over caller-owned memory; every tensor has its place at once.
struct FusedExecutor::Group : TwinGraph {
  Group(std::vector<uint8_t>& memory, Arena& scratch) : TwinGraph(context_over(memory)), arena(scratch) {
    graph = ggml_new_graph_custom(ctx(), kGraphNodesMax, false);
  }
  ~Group() override { ggml_free(ctx()); }

  ggml_tensor* tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void* data) {
    ggml_tensor* result = ggml_new_tensor_3d(ctx(), type, ne0, ne1, ne2);
    result->data = data;
    return result;
  }
  ggml_tensor* new_result(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) override {
    ggml_tensor* result = ggml_new_tensor_3d(ctx(), type, ne0, ne1, ne2);
    result->data = arena.take(ggml_nbytes(result));
    return result;
  }
  ggml_tensor* new_operand(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void* contents) override {
    return tensor(type, ne0, ne1, ne2, const_cast<void*>(contents));
  }
  ggml_tensor* side_weight(ggml_tensor* weight) override { return weight; }
  void add(ggml_tensor* node) override {
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml_graph_add_node(graph, node);
  }
  void add_custom(ggml_custom_op_t function, void* task) {
    ggml_tensor* node = ggml_custom_4d(ctx(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, function, GGML_N_TASKS_MAX, task);
    node->data = arena.take(sizeof(float));
    add(node);
  }

  ggml_cgraph* graph = nullptr;
  Arena& arena;
};

Result<std::unique_ptr<FusedExecutor>> FusedExecutor::create() {
  std::unique_ptr<FusedExecutor> executor(new FusedExecutor);
  executor->backend_ = ggml_backend_cpu_init();
  if (executor->backend_ == nullptr) return make_error(ErrorCode::kUnsupported, "ggml's CPU backend does not start");
  // Room for the graph, its nodes and three operands of each.
  executor->graph_memory_.resize(ggml_graph_overhead_custom(kGraphNodesMax, false) + 4 * kGraphNodesMax * ggml_tensor_overhead());
  return executor;
}

FusedExecutor::~FusedExecutor() { ggml_backend_free(backend_); }

Status FusedExecutor::run_graph(ggml_cgraph* graph) {
  switch (ggml_backend_graph_compute(backend_, graph)) {
    case GGML_STATUS_SUCCESS: return {};
    case GGML_STATUS_ABORTED: return make_error(ErrorCode::kCancelled, "computation stopped on request");
    case GGML_STATUS_ALLOC_FAILED: return make_error(ErrorCode::kNoMemory, "ggml's CPU backend found no memory for its work");
    default: return make_error(ErrorCode::kUnsupported, "ggml's CPU backend refused a graph");
  }
}

Status FusedExecutor::compute_nodes(std::span<ggml_tensor* const> nodes) {
  while (!nodes.empty()) {
    const size_t n = std::min(nodes.size(), kGraphNodesMax);
    group_arena_.reset();
    Group group(graph_memory_, group_arena_);
    bool any = false;
    for (ggml_tensor* node : nodes.first(n)) {
      ggml_graph_add_node(group.graph, node);
      any = any || (node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_NONE);
    }
    if (any) {
      if (Status status = run_graph(group.graph); !status) return status;
    }
    nodes = nodes.subspan(n);
  }
  return {};
}

const FusedExecutor::Converted& FusedExecutor::converted_input(ggml_type type) const {
  for (const Converted& input : inputs_) {
    if (input.type == type) return input;
  }
  SLUICE_ASSERT(false, "no converted input of type {}", ggml_type_name(type));
  return inputs_.front();
}

std::string FusedExecutor::refusal(const MoeBlock& block) {
  const auto type_refusal = [](const ggml_tensor* weight) -> std::string {
    const ggml_type_traits_cpu* traits = ggml_get_type_traits_cpu(weight->type);
    if (traits->vec_dot == nullptr) return fmt::format("type {} has no public dot product", ggml_type_name(weight->type));
    if (ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float != nullptr) return {};
    return fmt::format("nothing converts to {}, which the dot product of type {} wants", ggml_type_name(traits->vec_dot_type),
                       ggml_type_name(weight->type));
  };
  for (const ggml_tensor* node : block.first) {
    if (std::string reason = type_refusal(node->src[0]); !reason.empty()) return reason;
  }
  for (const ggml_tensor* node : block.middle) {
    if (node->op != GGML_OP_VIEW && !is_elementwise(node)) {
      return fmt::format("operation {} between the matrices is not of its list", ggml_op_name(node->op));
    }
  }
  return type_refusal(block.down->src[0]);
}

Status FusedExecutor::begin_block(const MoeBlock& block, const Routing& routing) {
  ++(block.first.empty() ? counters_.lone_blocks : counters_.fused_blocks);
  block_ = &block;
  routing_ = &routing;
  block_arena_.reset();
  group_arena_.reset();
  inputs_.clear();

  n_expert_left_ = routing.experts().size();
  converted_ = false;
  const auto convert_to = [&](ggml_type type) {
    if (std::any_of(inputs_.begin(), inputs_.end(), [&](const Converted& input) { return input.type == type; })) return;
    Converted input{.type = type, .row_bytes = row_bytes(type, block.x->ne[0])};
    input.data = static_cast<std::byte*>(block_arena_.take(input.row_bytes * static_cast<uint64_t>(block.x->ne[1] * block.x->ne[2])));
    inputs_.push_back(input);
  };
  for (const ggml_tensor* node : block.first) convert_to(input_type(node->src[0], description_of(node->src[0])));
  if (block.first.empty()) convert_to(input_type(block.down->src[0], *block.weight));
  if (!block.outside.empty()) {  // which may overwrite the input, once it has been read for the last time
    Group group(graph_memory_, group_arena_);
    add_conversions(group);
    if (Status status = run_graph(group.graph); !status) return status;
  }
  if (Status status = operands_.copy(block, block_arena_, *this); !status) return status;
  weights_ = nullptr;
  if (block.weights != nullptr) {
    weights_ = block_arena_.take_array<float>(routing.n_row());
    for (uint32_t row = 0; row < routing.n_row(); ++row) {
      const size_t offset = row / routing.top_k() * block.weights->nb[2] + row % routing.top_k() * block.weights->nb[1];
      std::memcpy(weights_ + row, static_cast<const char*>(block.weights->data) + offset, sizeof(float));
    }
  }
  return {};
}

Status FusedExecutor::compute(std::span<const ReadyExpert> experts) {
  while (!experts.empty()) {
    size_t n = 0;
    uint32_t n_row = 0;
    do {
      n_row += static_cast<uint32_t>(routing_->rows(experts[n].index).size());
      ++n;
    } while (n < experts.size() && n < kGroupExpertsMax && n_row + routing_->rows(experts[n].index).size() <= kGroupRowsMax);
    if (Status status = compute_group(experts.first(n)); !status) return status;
    experts = experts.subspan(n);
  }
  return {};
}

void FusedExecutor::add_conversions(Group& group) {
  const ggml_tensor* x = block_->x;
  for (const Converted& input : inputs_) {
    auto* task = new (group.arena.take(sizeof(ConvertTask))) ConvertTask{.from = static_cast<const std::byte*>(x->data),
                                                                         .n_row = x->ne[1] * x->ne[2],
                                                                         .n_inner = x->ne[1],
                                                                         .inner_stride = x->nb[1],
                                                                         .outer_stride = x->nb[2],
                                                                         .to = input.data,
                                                                         .to_row_bytes = input.row_bytes,
                                                                         .n = x->ne[0],
                                                                         .convert = ggml_get_type_traits_cpu(input.type)->from_float};
    group.add_custom(run_convert, task);
  }
  converted_ = true;
}

// The sum of each token's rows of down, with the operations of ggml's ADD_ID, MUL and ADD in their order.
void FusedExecutor::add_sum(Group& group) {
  const ggml_tensor* down = block_->down;
  auto* task = new (group.arena.take(sizeof(SumTask))) SumTask{.rows = static_cast<const std::byte*>(down->data),
                                                               .choice_stride = down->nb[1],
                                                               .token_stride = down->nb[2],
                                                               .weights = weights_,
                                                               .ids = routing_->ids().data(),
                                                               .top_k = block_->top_k(),
                                                               .n_token = block_->n_token(),
                                                               .n = down->ne[0],
                                                               .out = static_cast<std::byte*>(block_->sum->data),
                                                               .out_stride = block_->sum->nb[1],
                                                               .total_ns = &counters_.scatter_ns};
  if (block_->down_bias != nullptr) {
    task->bias = static_cast<const std::byte*>(block_->down_bias->data);
    task->bias_stride = block_->down_bias->nb[1];
  }
  group.add_custom(run_sum, task);
}

Status FusedExecutor::compute_group(std::span<const ReadyExpert> experts) {
  group_arena_.reset();
  Group group(graph_memory_, group_arena_);
  if (!converted_) add_conversions(group);
  Arena& arena = group_arena_;
  const uint32_t top_k = routing_->top_k();

  // The compact rows of the group: first those of experts with few rows, then the others', expert by expert.
  few_.clear();
  many_.clear();
  rows_.clear();
  for (const bool many : {false, true}) {
    for (const ReadyExpert& expert : experts) {
      const auto rows = routing_->rows(expert.index);
      if ((rows.size() >= kDelegateRowsMin) != many) continue;
      (many ? many_ : few_).push_back({.expert = &expert, .first_row = rows_.size(), .n_row = rows.size()});
      rows_.insert(rows_.end(), rows.begin(), rows.end());
    }
  }
  const size_t first_many_row = many_.empty() ? rows_.size() : many_.front().first_row;
  const int64_t n_row = static_cast<int64_t>(rows_.size());

  const auto input_row = [&](const Converted& input, uint32_t row) {
    const int64_t n_inner = block_->x->ne[1];
    const int64_t index = (row / top_k) * n_inner + (row % top_k) % n_inner;
    return static_cast<const std::byte*>(input.data + static_cast<uint64_t>(index) * input.row_bytes);
  };
  const auto down_row = [&](uint32_t row) {
    return static_cast<std::byte*>(block_->down->data) + (row % top_k) * block_->down->nb[1] + (row / top_k) * block_->down->nb[2];
  };

  // Few rows: a product for each expert and matrix. in and out give the places of the group's i-th row.
  const auto add_products = [&](ProductsTask& task, const ggml_tensor* weight, MatrixRole role, auto in, auto out) {
    for (const GroupExpert& entry : few_) {
      Product product;
      product.weight = entry.expert->slab[static_cast<size_t>(role)];
      product.weight_row_bytes = row_bytes(weight->type, weight->ne[0]);
      product.n_in = weight->ne[0];
      product.n_out = weight->ne[1];
      product.dot = ggml_get_type_traits_cpu(weight->type)->vec_dot;
      product.n_row = static_cast<uint32_t>(entry.n_row);
      product.in = arena.take_array<const std::byte*>(entry.n_row);
      product.out = arena.take_array<float*>(entry.n_row);
      for (size_t i = 0; i < entry.n_row; ++i) {
        product.in[i] = in(entry.first_row + i);
        product.out[i] = out(entry.first_row + i);
      }
      const int64_t rows_of_chunk = static_cast<int64_t>(kChunkBytes / product.weight_row_bytes);
      product.chunk_rows = std::max(kChunkRowsMin, rows_of_chunk / kChunkRowsMin * kChunkRowsMin);
      product.first_chunk = task.n_chunk;
      task.n_chunk += (product.n_out + product.chunk_rows - 1) / product.chunk_rows;
      task.products[task.n_product++] = product;
    }
  };
  const auto new_task = [&](size_t n_matrix) {
    return ProductsTask{.products = arena.take_array<Product>(few_.size() * n_matrix), .n_product = 0, .n_chunk = 0};
  };

  // Many rows, or a native layout: ggml's MUL_MAT_ID with one matrix, from rows that lie at equal distances to rows that
  // lie side by side. `in` and `out` are those of the group's row `base`, the first that is delegated.
  int32_t* zeros = arena.take_array<int32_t>(std::max<size_t>(rows_.size(), 1));
  std::memset(zeros, 0, rows_.size() * sizeof(int32_t));
  const auto base_of = [&](const ExpertWeight& description) { return description.native != nullptr ? 0 : first_many_row; };
  const auto add_delegates = [&](const ggml_tensor* node, const ExpertWeight& description, ggml_type in_type, const std::byte* in,
                                 uint64_t in_stride, float* out) {
    const ggml_tensor* weight = node->src[0];
    const auto add = [&](const GroupExpert& entry) {
      const size_t offset = entry.first_row - base_of(description);
      const int64_t n = static_cast<int64_t>(entry.n_row);
      std::byte* slab = const_cast<std::byte*>(entry.expert->slab[static_cast<size_t>(description.role)]);
      ggml_tensor* matrix = group.tensor(weight->type, weight->ne[0], weight->ne[1], 1, slab);
      if (description.native != nullptr) {
        const bool native = description.native->make_native(matrix);
        SLUICE_ASSERT(native, "{}: no native layout", weight->name);
      }
      ggml_tensor* input = group.tensor(in_type, weight->ne[0], 1, n, const_cast<std::byte*>(in + offset * in_stride));
      input->nb[1] = input->nb[2] = in_stride;
      input->nb[3] = in_stride * static_cast<size_t>(n);
      ggml_tensor* product = ggml_mul_mat_id(group.ctx(), matrix, input, group.tensor(GGML_TYPE_I32, 1, n, 1, zeros));
      product->data = out + static_cast<int64_t>(offset) * weight->ne[1];
      std::memcpy(product->op_params, node->op_params, sizeof(product->op_params));
      group.add(product);
    };
    if (description.native != nullptr) std::for_each(few_.begin(), few_.end(), add);
    std::for_each(many_.begin(), many_.end(), add);
  };
  const auto gather_input = [&](const Converted& input, size_t base) {
    const size_t n = rows_.size() - base;
    auto* gathered = static_cast<std::byte*>(arena.take(n * input.row_bytes));
    auto* task = new (arena.take(sizeof(CopyRowsTask))) CopyRowsTask{.from = arena.take_array<const std::byte*>(n),
                                                                     .to = arena.take_array<std::byte*>(n),
                                                                     .n_row = static_cast<int64_t>(n),
                                                                     .bytes = input.row_bytes};
    for (size_t i = 0; i < n; ++i) {
      task->from[i] = input_row(input, rows_[base + i]);
      task->to[i] = gathered + i * input.row_bytes;
    }
    group.add_custom(run_copy_rows, task);
    return gathered;
  };

  const ggml_tensor* down_weight = block_->down->src[0];
  const ExpertWeight& down_description = *block_->weight;
  const ggml_type down_type = input_type(down_weight, down_description);
  const size_t down_base = base_of(down_description);
  const bool down_delegates = down_base < rows_.size();
  ProductsTask first_task = new_task(std::max<size_t>(block_->first.size(), 1));
  ProductsTask down_task = new_task(1);
  ConvertTask convert;
  const std::byte* down_in = nullptr;  // of the rows from down_base on
  uint64_t down_in_stride = row_bytes(down_type, down_weight->ne[0]);
  const auto down_out = [&](size_t i) { return reinterpret_cast<float*>(down_row(rows_[i])); };
  if (block_->first.empty()) {
    const Converted& input = converted_input(down_type);
    if (down_base > 0) {
      add_products(down_task, down_weight, down_description.role, [&](size_t i) { return input_row(input, rows_[i]); }, down_out);
    }
    if (down_delegates) down_in = gather_input(input, down_base);
  } else {
    std::array<std::array<std::byte*, 2>, kConvertedMax> gathered = {};
    for (const ggml_tensor* node : block_->first) {
      const ggml_tensor* weight = node->src[0];
      const ExpertWeight& description = description_of(weight);
      const Converted& input = converted_input(input_type(weight, description));
      ggml_tensor* twin = group.new_result(GGML_TYPE_F32, node->ne[0], 1, n_row);
      group.set_twin(node, twin);
      const auto out = [&](size_t i) { return static_cast<float*>(twin->data) + static_cast<int64_t>(i) * twin->ne[0]; };
      const size_t base = base_of(description);
      if (base > 0) add_products(first_task, weight, description.role, [&](size_t i) { return input_row(input, rows_[i]); }, out);
      if (base == rows_.size()) continue;
      // Plain floats may be wanted from row 0 by one matrix and from the many on by another: one of F32 weights.
      std::byte*& side_by_side = gathered[static_cast<size_t>(&input - inputs_.data())][base == 0];
      if (side_by_side == nullptr) side_by_side = gather_input(input, base);
      add_delegates(node, description, input.type, side_by_side, input.row_bytes, out(base));
    }
    if (first_task.n_product > 0) group.add_custom(run_products, &first_task);
    const ggml_tensor* middle = build_middle(*block_, *routing_, operands_, rows_, arena, group);
    if (down_description.native != nullptr) {
      down_in = static_cast<const std::byte*>(middle->data);
      down_in_stride = middle->nb[2];
    } else {
      convert = {.from = static_cast<const std::byte*>(middle->data),
                 .n_row = n_row,
                 .n_inner = n_row,
                 .inner_stride = middle->nb[2],
                 .outer_stride = 0,
                 .to = static_cast<std::byte*>(arena.take(down_in_stride * rows_.size())),
                 .to_row_bytes = down_in_stride,
                 .n = middle->ne[0],
                 .convert = ggml_get_type_traits_cpu(down_type)->from_float};
      group.add_custom(run_convert, &convert);
      const auto in = [&](size_t i) { return static_cast<const std::byte*>(convert.to + i * convert.to_row_bytes); };
      if (down_base > 0) add_products(down_task, down_weight, MatrixRole::kDown, in, down_out);
      down_in = convert.to + down_base * convert.to_row_bytes;
    }
  }
  if (down_task.n_product > 0) group.add_custom(run_products, &down_task);

  CopyRowsTask scatter;
  if (down_delegates) {
    const size_t n = rows_.size() - down_base;
    float* products = arena.take_array<float>(n * static_cast<size_t>(down_weight->ne[1]));
    add_delegates(block_->down, down_description, down_type, down_in, down_in_stride, products);
    scatter = {.from = arena.take_array<const std::byte*>(n),
               .to = arena.take_array<std::byte*>(n),
               .n_row = static_cast<int64_t>(n),
               .bytes = static_cast<uint64_t>(down_weight->ne[1]) * sizeof(float),
               .total_ns = &counters_.scatter_ns};
    for (size_t i = 0; i < n; ++i) {
      scatter.from[i] = reinterpret_cast<const std::byte*>(products) + i * scatter.bytes;
      scatter.to[i] = down_row(rows_[down_base + i]);
    }
    group.add_custom(run_copy_rows, &scatter);
  }
  SLUICE_ASSERT(experts.size() <= n_expert_left_, "{} experts computed, {} were left", experts.size(), n_expert_left_);
  n_expert_left_ -= experts.size();
  if (n_expert_left_ == 0 && block_->sum != nullptr) add_sum(group);
  return run_graph(group.graph);
}

}  // namespace sluice
