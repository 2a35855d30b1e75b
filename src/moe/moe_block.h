// One MoE block as it stands in a ggml graph: which nodes are the expert matrices, which lie between them, and how the
// same arithmetic is said for any subset of the routed rows. Finds and checks; computes nothing (moe/expert_executor.h).
//
// The block that is looked for, in the node order of the graph (T tokens, k choices each, a row is one (token, choice)):
//   gate, up or gate_up   MUL_MAT_ID(W [n_in, n_out, n_expert], x [n_in, 1 or k, T], ids [k, T]) -> [n_out, k, T]
//   middle                operations that treat every row alone: GLU, unary, scale, clamp, per-expert bias, norms, ...
//   down                  MUL_MAT_ID(W, middle's result, ids) -> [n_embd, k, T]
//   sum                   optional bias (ADD_ID), MUL by the router's weights [1, k, T], a VIEW of each choice, and ADDs
//                         of them in the router's order -> [n_embd, T]
// Each middle operation is rebuilt on compact tensors [ne0, 1, P] of any P rows, so experts can be computed in groups,
// in any order, without a full intermediate tensor, and every row goes through exactly the arithmetic it would have
// gone through in the whole tensor. A lone MUL_MAT_ID (a graph cut by an evaluation callback, a test) is a block
// with a down matrix only.
//
// Lifetime a block borrows the graph's tensors; it lives for one computation.
// Errors   a node that does not fit makes find_moe_block return a lone block: slower, never wrong.
// Cost     no allocation once the vectors have grown; about a microsecond for a block of Qwen3-Next.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ggml.h"
#include "store/expert_tensor.h"

namespace sluice {

class NativeLayout;

// What the backend knows about a weight of one of its MUL_MAT_IDs; hung on ggml_tensor::extra.
struct ExpertWeight {
  uint32_t layer = 0;
  MatrixRole role = MatrixRole::kDown;
  // Where the bytes are when they are held in memory and not streamed; nullptr when a loader has them.
  const std::byte* resident = nullptr;
  void* owner = nullptr;  // the backend's model, opaque here
  const NativeLayout* native = nullptr;  // its slabs are in this layout; nullptr: as in the GGUF
};

struct MoeBlock {
  const ggml_tensor* ids = nullptr;
  const ggml_tensor* x = nullptr;                 // input of the first matrices; of down in a lone block
  std::vector<ggml_tensor*> first;                // gate, up or gate_up nodes; empty in a lone block
  std::vector<ggml_tensor*> middle;               // in graph order, views included
  std::vector<ggml_tensor*> outside;              // nodes in the block's range that do not depend on its matrices
  ggml_tensor* down = nullptr;
  const ExpertWeight* weight = nullptr;           // of down
  // The weighted sum, where it stands behind down in just that form; else `sum` is null and its nodes are left to others.
  const ggml_tensor* down_bias = nullptr;         // [n_embd, n_expert]; null: none
  const ggml_tensor* weights = nullptr;           // [1, k, T]; null: the plain sum
  ggml_tensor* sum = nullptr;
  std::vector<ggml_tensor*> sum_nodes;            // from behind down to `sum`, in order; empty without a sum
  int end_node = 0;                               // index after the last node of the block
  const char* lone_reason = "";                   // of a lone block: why the whole one was not taken

  int64_t n_token() const { return ids->ne[1]; }
  int64_t top_k() const { return ids->ne[0]; }
};

using ExpertWeightOf = const ExpertWeight* (*)(const ggml_tensor* weight);  // nullptr: not ours

// The block whose first node is nodes[begin], which must be a MUL_MAT_ID with a weight of ours.
void find_moe_block(std::span<ggml_tensor* const> nodes, int begin, ExpertWeightOf weight_of, MoeBlock& block);

// True for operations that compute each value from the values at its place, and for GLU.
bool is_elementwise(const ggml_tensor* node);
// True for the operations that may stand in the middle of a block: each result row depends on its own row only.
bool is_row_local(const ggml_tensor* node);

}  // namespace sluice
