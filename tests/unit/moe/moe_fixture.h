// A MoE block as llama.cpp builds it, over random weights, computed twice: by ggml's CPU backend over whole tensors
// (the reference), and by our executor over slabs. Intermediate tensors of the second graph are placed by ggml's own
// graph allocator, which reuses memory as it does in llama.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-cpu.h"
#include "moe/cpu_executor.h"
#include "moe/moe_block.h"

namespace sluice {

struct BlockShape {
  ggml_type gate_type = GGML_TYPE_Q4_0;
  ggml_type down_type = GGML_TYPE_Q4_0;
  int64_t n_embd = 256;
  int64_t n_ff = 256;
  int64_t n_expert = 16;
  int64_t top_k = 4;
  int64_t n_token = 5;
  enum class Middle { kSwiglu, kSwigluOai, kGeglu, kReluSquared, kClampedSilu, kNone } middle = Middle::kSwiglu;
  bool fused_gate_up = false;
  bool biases = false;
  bool scales = false;       // per-expert scales, computed by a node inside the block's range that is not of the block
  bool repeated_ids = false; // one token may choose an expert twice
};

inline void PrintTo(const BlockShape& shape, std::ostream* out) {
  *out << ggml_type_name(shape.gate_type) << "/" << ggml_type_name(shape.down_type) << " tokens " << shape.n_token << " middle "
       << static_cast<int>(shape.middle) << (shape.fused_gate_up ? " fused" : "") << (shape.biases ? " biases" : "")
       << (shape.scales ? " scales" : "");
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
    x = ggml_new_tensor_3d(weights_ctx_, GGML_TYPE_F32, shape.n_embd, 1, t);
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
      // Quantising to the smallest types is slow, so rows are drawn from a stock; each matrix starts elsewhere in it.
      constexpr int64_t kStockRows = 61;
      std::vector<float> row(static_cast<size_t>(w->ne[0]));
      std::vector<float> importance(row.size(), 1.0f);
      std::vector<char> stock(static_cast<size_t>(kStockRows) * w->nb[1]);
      for (int64_t r = 0; r < kStockRows; ++r) {
        for (float& value : row) value = normal(random) * 0.08f;
        ggml_quantize_chunk(w->type, row.data(), stock.data() + r * static_cast<int64_t>(w->nb[1]), 0, 1, w->ne[0], importance.data());
      }
      for (int64_t r = 0; r < w->ne[1] * w->ne[2]; ++r) {
        const int64_t from = (r + 7 * (r / w->ne[1])) % kStockRows;
        std::memcpy(static_cast<char*>(w->data) + r * static_cast<int64_t>(w->nb[1]), stock.data() + from * static_cast<int64_t>(w->nb[1]),
                    w->nb[1]);
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
    }
    ggml_tensor* down = ggml_mul_mat_id(ctx_, down_w, middle, ids);
    ggml_tensor* experts = shape.biases ? ggml_add_id(ctx_, down, down_bias, ids) : down;
    experts = ggml_mul(ctx_, experts, weights);
    expand(experts);
    ggml_tensor* sum = nullptr;
    for (int64_t i = 0; i < k; ++i) {
      ggml_tensor* part = ggml_view_2d(ctx_, experts, shape.n_embd, t, experts->nb[2], static_cast<size_t>(i) * experts->nb[1]);
      expand(part);
      sum = sum == nullptr ? part : ggml_add(ctx_, sum, part);
    }
    result = k == 1 ? ggml_cont(ctx_, sum) : sum;
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

  // Where expert e's matrices are in the whole tensors.
  ReadyExpert ready(uint32_t index, uint32_t expert) const {
    ReadyExpert entry{.index = index};
    for (const ggml_tensor* w : {gate_w, up_w, gate_up_w, down_w}) {
      if (w == nullptr) continue;
      const auto* description = static_cast<const ExpertWeight*>(w->extra);
      entry.slab[static_cast<size_t>(description->role)] = static_cast<const std::byte*>(w->data) + expert * w->nb[2];
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

  BlockShape shape_;
  ggml_context* ctx_ = nullptr;
  ggml_context* weights_ctx_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_gallocr_t allocator_ = nullptr;
  std::vector<ggml_tensor*> described_;
  std::vector<std::unique_ptr<ExpertWeight>> descriptions_;
};

inline const ExpertWeight* described_weight(const ggml_tensor* weight) { return static_cast<const ExpertWeight*>(weight->extra); }

}  // namespace sluice
