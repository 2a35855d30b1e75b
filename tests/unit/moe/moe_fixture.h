// A MoE block as llama.cpp builds it, over random weights, to be computed by ggml's CPU backend over whole tensors (the
// reference) and by our executors over slabs. Intermediate tensors are placed by ggml's own graph allocator, which reuses
// memory as it does in llama.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-cpu.h"
#include "moe/arena.h"
#include "moe/expert_executor.h"
#include "moe/moe_block.h"
#include "moe/native_layout.h"

namespace sluice {

struct BlockShape {
  ggml_type gate_type = GGML_TYPE_Q4_0;
  ggml_type down_type = GGML_TYPE_Q4_0;
  int64_t n_embd = 256;
  int64_t n_ff = 256;
  int64_t n_expert = 16;
  int64_t top_k = 4;
  int64_t n_token = 5;
  enum class Middle { kSwiglu, kSwigluOai, kGeglu, kReluSquared, kClampedSilu, kNone, kNormed } middle = Middle::kSwiglu;
  bool fused_gate_up = false;
  bool biases = false;
  bool scales = false;       // per-expert scales, computed by a node inside the block's range that is not of the block
  bool repeated_ids = false; // one token may choose an expert twice
  bool input_per_choice = false;  // weighted before the matrices, as in Llama 4
  bool compute_sum = true;   // by ADDs of all choices; else the graph ends with the weighted rows
};

inline void PrintTo(const BlockShape& shape, std::ostream* out) {
  *out << ggml_type_name(shape.gate_type) << "/" << ggml_type_name(shape.down_type) << " " << shape.n_embd << "x" << shape.n_ff
       << " experts " << shape.top_k << " of " << shape.n_expert << " tokens " << shape.n_token << " middle "
       << static_cast<int>(shape.middle) << (shape.fused_gate_up ? " fused" : "") << (shape.biases ? " biases" : "")
       << (shape.scales ? " scales" : "") << (shape.repeated_ids ? " repeated" : "") << (shape.input_per_choice ? " per choice" : "");
}

// Rows of a matrix are put together from a stock of pieces that is made once per type. Quantising to the smallest types
// takes seconds, so their pieces are random bytes that happen to mean values of a usual size.
constexpr int64_t kStockPieces = 61;
inline int64_t piece_values(ggml_type type) { return std::max<int64_t>(ggml_blck_size(type), 32); }
inline const std::vector<char>& weight_stock(ggml_type type) {
  static std::map<ggml_type, std::vector<char>> stocks;
  std::vector<char>& stock = stocks[type];
  if (!stock.empty()) return stock;
  const int64_t n = piece_values(type);
  std::mt19937 random(static_cast<unsigned>(type) + 1);
  std::normal_distribution<float> normal(0.0f, 0.08f);
  std::vector<float> values(static_cast<size_t>(kStockPieces * n));
  for (float& value : values) value = normal(random);
  const size_t piece_bytes = ggml_row_size(type, n);
  stock.resize(static_cast<size_t>(kStockPieces) * piece_bytes);
  const std::string name = ggml_type_name(type);
  if (!name.starts_with("iq1") && !name.starts_with("iq2") && !name.starts_with("iq3")) {
    ggml_quantize_chunk(type, values.data(), stock.data(), 0, kStockPieces, n, nullptr);
    return stock;
  }
  for (int64_t piece = 0; piece < kStockPieces;) {
    char* to = stock.data() + static_cast<size_t>(piece) * piece_bytes;
    for (size_t i = 0; i < piece_bytes; ++i) to[i] = static_cast<char>(random());
    ggml_get_type_traits(type)->to_float(to, values.data(), n);
    float largest = 0;
    for (const float value : std::span(values).first(static_cast<size_t>(n))) {
      largest = std::isfinite(value) ? std::max(largest, std::abs(value)) : INFINITY;
    }
    piece += largest > 0.01f && largest < 1.0f;
  }
  return stock;
}

class BlockGraph {
 public:
  BlockGraph(const BlockShape& shape, unsigned seed) : shape_(shape) {
    ctx_ = ggml_init({.mem_size = 4 * 1024 * 1024, .mem_buffer = nullptr, .no_alloc = true});
    weights_ctx_ = ggml_init({.mem_size = 1024 * 1024, .mem_buffer = nullptr, .no_alloc = true});
    const int64_t k = shape.top_k;
    const int64_t t = shape.n_token;
    if (shape.fused_gate_up) {
      gate_up_w = weight(shape.gate_type, shape.n_embd, 2 * shape.n_ff, MatrixRole::kGateUp);
    } else {
      gate_w = weight(shape.gate_type, shape.n_embd, shape.n_ff, MatrixRole::kGate);
      up_w = weight(shape.gate_type, shape.n_embd, shape.n_ff, MatrixRole::kUp);
    }
    down_w = weight(shape.down_type, shape.n_ff, shape.n_embd, MatrixRole::kDown);
    ggml_tensor* up_bias = ggml_new_tensor_2d(weights_ctx_, GGML_TYPE_F32, shape.fused_gate_up ? 2 * shape.n_ff : shape.n_ff, shape.n_expert);
    ggml_tensor* down_bias = ggml_new_tensor_2d(weights_ctx_, GGML_TYPE_F32, shape.n_embd, shape.n_expert);
    ggml_tensor* scale = ggml_new_tensor_3d(weights_ctx_, GGML_TYPE_F32, 1, k, t);
    x = ggml_new_tensor_3d(weights_ctx_, GGML_TYPE_F32, shape.n_embd, shape.input_per_choice ? k : 1, t);
    // The router's choice is a view of an argsort over all experts, so its rows are far apart.
    ggml_tensor* sorted = ggml_new_tensor_2d(weights_ctx_, GGML_TYPE_I32, shape.n_expert, t);
    weights = ggml_new_tensor_3d(weights_ctx_, GGML_TYPE_F32, 1, k, t);
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx_, ggml_backend_cpu_buffer_type());
    ids = ggml_view_2d(weights_ctx_, sorted, k, t, sorted->nb[1], 0);
    ggml_backend_view_init(ids);

    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (ggml_tensor* w : {gate_w, up_w, gate_up_w, down_w}) {
      if (w == nullptr) continue;
      const std::vector<char>& stock = weight_stock(w->type);
      const uint64_t piece_bytes = stock.size() / kStockPieces;
      const uint64_t n_piece = ggml_nbytes(w) / piece_bytes;
      auto* to = static_cast<char*>(w->data);
      for (uint64_t i = 0, piece = random(); i < n_piece; ++i, piece += 1 + i % 5) {
        std::memcpy(to + i * piece_bytes, stock.data() + piece % kStockPieces * piece_bytes, piece_bytes);
      }
    }
    for (ggml_tensor* f : {up_bias, down_bias, scale, x, weights}) {
      for (int64_t i = 0; i < ggml_nelements(f); ++i) static_cast<float*>(f->data)[i] = normal(random);
    }
    for (int64_t token = 0; token < t; ++token) {
      auto* row = static_cast<int32_t*>(sorted->data) + token * shape.n_expert;
      for (int64_t e = 0; e < shape.n_expert; ++e) row[e] = static_cast<int32_t>(e);
      // skewed, so that some experts get many rows and some none
      for (int64_t e = 0; e < k; ++e) {
        const auto reach = static_cast<unsigned>(random() % 2 ? shape.n_expert : std::max<int64_t>(k, shape.n_expert / 4));
        std::swap(row[e], row[std::max<int64_t>(e, static_cast<int64_t>(random() % reach))]);
      }
      if (shape.repeated_ids && k > 1) row[1] = row[0];
    }

    graph = ggml_new_graph(ctx_);
    const auto expand = [&](ggml_tensor* tensor) { ggml_build_forward_expand(graph, tensor); };
    ggml_tensor* gate = nullptr;
    ggml_tensor* up = nullptr;
    if (shape.fused_gate_up) {
      ggml_tensor* both = ggml_mul_mat_id(ctx_, gate_up_w, x, ids);
      if (shape.scales) both = ggml_mul(ctx_, both, ggml_scale(ctx_, scale, 0.5f));
      if (shape.biases) both = ggml_add_id(ctx_, both, up_bias, ids);
      gate = ggml_view_3d(ctx_, both, shape.n_ff, k, t, both->nb[1], both->nb[2], 0);
      up = ggml_view_3d(ctx_, both, shape.n_ff, k, t, both->nb[1], both->nb[2], static_cast<size_t>(shape.n_ff) * sizeof(float));
    } else {
      up = ggml_mul_mat_id(ctx_, up_w, x, ids);
      if (shape.scales) up = ggml_mul(ctx_, up, ggml_scale(ctx_, scale, 0.5f));
      if (shape.biases) up = ggml_add_id(ctx_, up, up_bias, ids);
      gate = shape.middle == BlockShape::Middle::kNone ? up : ggml_mul_mat_id(ctx_, gate_w, x, ids);
    }
    ggml_tensor* middle = nullptr;
    switch (shape.middle) {
      case BlockShape::Middle::kSwiglu: middle = ggml_swiglu_split(ctx_, gate, up); break;
      case BlockShape::Middle::kSwigluOai: middle = ggml_swiglu_oai(ctx_, gate, up, 1.702f, 7.0f); break;
      case BlockShape::Middle::kGeglu: middle = ggml_geglu_split(ctx_, gate, up); break;
      case BlockShape::Middle::kReluSquared: middle = ggml_mul(ctx_, ggml_sqr(ctx_, ggml_relu(ctx_, gate)), up); break;
      case BlockShape::Middle::kClampedSilu:
        middle = ggml_mul(ctx_, ggml_clamp(ctx_, ggml_silu(ctx_, gate), -1e9f, 0.5f), ggml_clamp(ctx_, up, -0.5f, 0.5f));
        break;
      case BlockShape::Middle::kNone: middle = ggml_silu(ctx_, up); break;
      case BlockShape::Middle::kNormed: middle = ggml_rms_norm(ctx_, ggml_swiglu_split(ctx_, gate, up), 1e-6f); break;
    }
    ggml_tensor* down = ggml_mul_mat_id(ctx_, down_w, middle, ids);
    ggml_tensor* experts = shape.biases ? ggml_add_id(ctx_, down, down_bias, ids) : down;
    experts = ggml_mul(ctx_, experts, weights);
    expand(experts);
    ggml_tensor* sum = nullptr;
    for (int64_t i = 0; i < k && shape.compute_sum; ++i) {
      ggml_tensor* part = ggml_view_2d(ctx_, experts, shape.n_embd, t, experts->nb[2], static_cast<size_t>(i) * experts->nb[1]);
      expand(part);
      sum = sum == nullptr ? part : ggml_add(ctx_, sum, part);
    }
    result = !shape.compute_sum ? experts : k == 1 ? ggml_cont(ctx_, sum) : sum;
    ggml_set_output(result);
    expand(result);
    allocator_ = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    EXPECT_TRUE(ggml_gallocr_alloc_graph(allocator_, graph));
  }
  ~BlockGraph() {
    ggml_gallocr_free(allocator_);
    ggml_backend_buffer_free(buffer_);
    ggml_free(ctx_);
    ggml_free(weights_ctx_);
  }
  BlockGraph(const BlockGraph&) = delete;

  std::vector<float> result_values() const {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(result)));
    std::memcpy(values.data(), result->data, ggml_nbytes(result));
    return values;
  }

  // Overwrites whatever was computed, so that an executor that writes nothing shows.
  void forget_results() {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
      ggml_tensor* node = ggml_graph_node(graph, i);
      if (node->view_src == nullptr) std::memset(node->data, 0xff, ggml_nbytes(node));
    }
  }

  std::vector<ggml_tensor*> nodes() const {
    return {ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph)};
  }

  ggml_tensor* first_product() const {
    const std::vector<ggml_tensor*> all = nodes();
    return *std::find_if(all.begin(), all.end(), [](const ggml_tensor* node) { return node->op == GGML_OP_MUL_MAT_ID; });
  }

  // Where expert e's matrices are in the whole tensors.
  ReadyExpert ready(uint32_t index, uint32_t expert) const {
    ReadyExpert entry{.index = index};
    for (const ggml_tensor* w : {gate_w, up_w, gate_up_w, down_w}) {
      if (w == nullptr) continue;
      const auto* description = static_cast<const ExpertWeight*>(w->extra);
      const auto copy = copies_.find(w);
      entry.slab[static_cast<size_t>(description->role)] =
          copy != copies_.end() ? copy->second[expert] : static_cast<const std::byte*>(w->data) + expert * w->nb[2];
    }
    return entry;
  }

  ggml_tensor* gate_w = nullptr;
  ggml_tensor* up_w = nullptr;
  ggml_tensor* gate_up_w = nullptr;
  ggml_tensor* down_w = nullptr;
  ggml_tensor* x = nullptr;
  ggml_tensor* ids = nullptr;
  ggml_tensor* weights = nullptr;
  ggml_tensor* result = nullptr;
  ggml_cgraph* graph = nullptr;

  static ExpertTensorShape shape_of(const ggml_tensor* w) { return {w->type, w->ne[0], w->ne[1], w->ne[2], w->nb[2]}; }

  // From now on the slabs that `ready` gives are copies, `bytes` behind a multiple of 64.
  void shift_slabs(uint64_t bytes) {
    copy_slabs(bytes, [](const ggml_tensor* w, const std::byte* from, std::byte* to) { std::memcpy(to, from, w->nb[2]); });
  }
  // ... or copies in the native layout.
  void make_native(const NativeLayout& layout) {
    copy_slabs(0, [&](const ggml_tensor* w, const std::byte* from, std::byte* to) {
      EXPECT_TRUE(layout.apply(shape_of(w), from, to).ok());
    });
    for (auto& description : descriptions_) description->native = &layout;
  }

  // ggml itself must not see our descriptions: its tiled kernels take `extra` for a sign of a repacked weight.
  void describe_weights(bool on) {
    for (size_t i = 0; i < descriptions_.size(); ++i) described_[i]->extra = on ? descriptions_[i].get() : nullptr;
  }

 private:
  ggml_tensor* weight(ggml_type type, int64_t n_in, int64_t n_out, MatrixRole role) {
    ggml_tensor* w = ggml_new_tensor_3d(weights_ctx_, type, n_in, n_out, shape_.n_expert);
    auto description = std::make_unique<ExpertWeight>();
    description->layer = 3;
    description->role = role;
    description->owner = this;
    described_.push_back(w);
    descriptions_.push_back(std::move(description));
    return w;
  }

  template <typename Copy>
  void copy_slabs(uint64_t shift, Copy copy) {
    for (const ggml_tensor* w : described_) {
      for (int64_t e = 0; e < w->ne[2]; ++e) {
        std::byte* to = static_cast<std::byte*>(slabs_.take(w->nb[2] + shift)) + shift;
        copy(w, static_cast<const std::byte*>(w->data) + e * static_cast<int64_t>(w->nb[2]), to);
        copies_[w].push_back(to);
      }
    }
  }

  BlockShape shape_;
  Arena slabs_;
  std::map<const ggml_tensor*, std::vector<std::byte*>> copies_;
  ggml_context* ctx_ = nullptr;
  ggml_context* weights_ctx_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_gallocr_t allocator_ = nullptr;
  std::vector<ggml_tensor*> described_;
  std::vector<std::unique_ptr<ExpertWeight>> descriptions_;
};

inline const ExpertWeight* described_weight(const ggml_tensor* weight) { return static_cast<const ExpertWeight*>(weight->extra); }

}  // namespace sluice
