#include "moe/moe_block.h"

#include <algorithm>

namespace sluice {

namespace {

constexpr size_t kMiddleNodesMax = 32;  // longer blocks do not fit the executor's graphs

bool contains(const std::vector<ggml_tensor*>& list, const ggml_tensor* tensor) {
  return std::find(list.begin(), list.end(), tensor) != list.end();
}

// A result of the block's own: [any, k, T], float, each row whole.
bool has_row_shape(const ggml_tensor* node, const MoeBlock& block) {
  return node->type == GGML_TYPE_F32 && node->ne[1] == block.top_k() && node->ne[2] == block.n_token() && node->ne[3] == 1 &&
         node->nb[0] == sizeof(float);
}

// An operand from outside must be the same for all rows, or have a row for each (token, choice) or each token.
bool is_usable_operand(const ggml_tensor* node, int index, const MoeBlock& block) {
  const ggml_tensor* operand = node->src[index];
  if (node->op == GGML_OP_ADD_ID) return index == 1 ? operand->type == GGML_TYPE_F32 : operand == block.ids;
  return operand->type == GGML_TYPE_F32 && operand->nb[0] == sizeof(float) && operand->ne[3] == 1 &&
         (operand->ne[1] == 1 || operand->ne[1] == block.top_k()) &&
         (operand->ne[2] == 1 || operand->ne[2] == block.n_token());
}

// A view that takes part of every row: halves of a fused gate_up.
bool is_row_slice(const ggml_tensor* node) {
  const ggml_tensor* source = node->src[0];
  return node->op == GGML_OP_VIEW && source != nullptr && node->nb[1] == source->nb[1] && node->nb[2] == source->nb[2] &&
         node->view_offs >= source->view_offs &&
         node->view_offs - source->view_offs + static_cast<size_t>(node->ne[0]) * sizeof(float) <= source->nb[1];
}

void make_lone(ggml_tensor* node, int begin, const ExpertWeight* weight, MoeBlock& block) {
  block.first.clear();
  block.middle.clear();
  block.outside.clear();
  block.ids = node->src[2];
  block.x = node->src[1];
  block.down = node;
  block.weight = weight;
  block.end_node = begin + 1;
}

}  // namespace

bool is_row_local(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP:
    case GGML_OP_SQR:
    case GGML_OP_SQRT:
    case GGML_OP_MUL:
    case GGML_OP_ADD:
    case GGML_OP_SUB:
    case GGML_OP_DIV:
    case GGML_OP_ADD_ID: return true;
    default: return false;
  }
}

void find_moe_block(std::span<ggml_tensor* const> nodes, int begin, ExpertWeightOf weight_of, MoeBlock& block) {
  ggml_tensor* first = nodes[static_cast<size_t>(begin)];
  const ExpertWeight* first_weight = weight_of(first->src[0]);
  make_lone(first, begin, first_weight, block);
  if (first_weight->role == MatrixRole::kDown) return;

  MoeBlock whole;
  std::swap(whole, block);  // reuse the vectors' memory
  whole.ids = first->src[2];
  whole.x = first->src[1];
  whole.down = nullptr;
  bool fits = true;
  const auto is_inside = [&](const ggml_tensor* tensor) { return contains(whole.first, tensor) || contains(whole.middle, tensor); };
  for (size_t i = static_cast<size_t>(begin); fits && i < nodes.size(); ++i) {
    ggml_tensor* node = nodes[i];
    const ExpertWeight* weight = node->op == GGML_OP_MUL_MAT_ID ? weight_of(node->src[0]) : nullptr;
    if (weight != nullptr) {
      fits = weight->owner == first_weight->owner && weight->layer == first_weight->layer && node->src[2] == whole.ids;
      if (!fits) break;
      if (weight->role == MatrixRole::kDown) {
        fits = is_inside(node->src[1]) && has_row_shape(node->src[1], whole);
        whole.down = node;
        whole.weight = weight;
        whole.end_node = static_cast<int>(i) + 1;
        break;
      }
      fits = node->src[1] == whole.x;
      whole.first.push_back(node);
      continue;
    }
    const bool depends = std::any_of(std::begin(node->src), std::end(node->src),
                                     [&](const ggml_tensor* source) { return source != nullptr && is_inside(source); });
    if (!depends) {
      whole.outside.push_back(node);
      continue;
    }
    fits = has_row_shape(node, whole) && (node->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 && (is_row_local(node) || is_row_slice(node));
    for (int source = 0; fits && source < GGML_MAX_SRC; ++source) {
      if (node->src[source] == nullptr || is_inside(node->src[source])) continue;
      fits = is_usable_operand(node, source, whole);
    }
    whole.middle.push_back(node);
  }
  fits = fits && whole.down != nullptr && whole.middle.size() <= kMiddleNodesMax;
  // What lies in the middle is never written to its own tensor, so nobody after the block may read it.
  for (size_t i = static_cast<size_t>(whole.end_node); fits && i < nodes.size(); ++i) {
    for (const ggml_tensor* source : nodes[i]->src) {
      if (source != nullptr && is_inside(source)) fits = false;
    }
  }
  std::swap(whole, block);
  if (!fits) make_lone(first, begin, first_weight, block);
}

}  // namespace sluice
