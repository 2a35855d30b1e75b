#include "moe/moe_block.h"

#include <algorithm>
#include <array>

namespace sluice {

namespace {

constexpr size_t kMiddleNodesMax = 32;  // longer blocks do not fit the executor's graphs
constexpr size_t kSumNodesMax = 160;    // a sum over 64 choices and what surrounds it

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

void make_lone(ggml_tensor* node, int begin, const ExpertWeight* weight, const char* reason, MoeBlock& block) {
  block.first.clear();
  block.middle.clear();
  block.outside.clear();
  block.ids = node->src[2];
  block.x = node->src[1];
  block.down = node;
  block.weight = weight;
  block.down_bias = nullptr;
  block.weights = nullptr;
  block.sum = nullptr;
  block.sum_nodes.clear();
  block.end_node = begin + 1;
  block.lone_reason = reason;
}

bool overlap(const ggml_tensor* a, const ggml_tensor* b) {
  const auto* begin_a = static_cast<const char*>(a->data);
  const auto* begin_b = static_cast<const char*>(b->data);
  return begin_a < begin_b + ggml_nbytes(b) && begin_b < begin_a + ggml_nbytes(a);
}

// Looks for the weighted sum behind a block's down. Its intermediate results are never written, so nobody else may want
// them; and the result must not lie where the rows of down do, as ggml's allocator may have it.
void find_sum(std::span<ggml_tensor* const> nodes, MoeBlock& block) {
  const int64_t top_k = block.top_k();
  auto at = static_cast<size_t>(block.end_node);
  std::array<const ggml_tensor*, kSumNodesMax> unwritten = {};
  size_t n_unwritten = 0;
  const auto take = [&]() -> const ggml_tensor* {
    return unwritten[n_unwritten++] = nodes[at++];
  };
  // Bias, weights, views and sums.
  if (top_k < 2 || nodes.size() < at + 2 * static_cast<size_t>(top_k) - 1 || 2 * top_k + 2 > static_cast<int64_t>(kSumNodesMax)) return;
  const ggml_tensor* rows = unwritten[n_unwritten++] = block.down;
  const ggml_tensor* bias = nullptr;
  const ggml_tensor* weights = nullptr;
  if (nodes[at]->op == GGML_OP_ADD_ID && nodes[at]->src[0] == rows) {
    bias = nodes[at]->src[1];
    if (nodes[at]->src[2] != block.ids || bias->type != GGML_TYPE_F32 || bias->nb[0] != sizeof(float)) return;
    rows = take();
  }
  if (at < nodes.size() && nodes[at]->op == GGML_OP_MUL && nodes[at]->src[0] == rows) {
    weights = nodes[at]->src[1];
    if (weights->type != GGML_TYPE_F32 || weights->ne[0] != 1 || weights->ne[1] != top_k || weights->ne[2] != block.n_token()) return;
    rows = take();
  }
  if (nodes.size() < at + 2 * static_cast<size_t>(top_k) - 1) return;
  const size_t first_view = n_unwritten;
  for (int64_t choice = 0; choice < top_k; ++choice) {
    const ggml_tensor* view = take();
    const bool is_choice = view->op == GGML_OP_VIEW && view->src[0] == rows && view->ne[0] == rows->ne[0] && view->ne[1] == block.n_token() &&
                           view->ne[2] == 1 && view->ne[3] == 1 && view->nb[1] == rows->nb[2] &&
                           view->view_offs - rows->view_offs == static_cast<size_t>(choice) * rows->nb[1];
    if (!is_choice) return;
  }
  const ggml_tensor* sum = unwritten[first_view];
  for (int64_t choice = 1; choice < top_k; ++choice) {
    const ggml_tensor* add = nodes[at++];
    if (add->op != GGML_OP_ADD || add->src[0] != sum || add->src[1] != unwritten[first_view + static_cast<size_t>(choice)]) return;
    sum = add;
    if (choice + 1 < top_k) unwritten[n_unwritten++] = add;
  }
  if (sum->type != GGML_TYPE_F32 || sum->nb[0] != sizeof(float) || overlap(sum, block.down)) return;
  const auto is_unwritten = [&](const ggml_tensor* tensor) {
    return std::find(unwritten.begin(), unwritten.begin() + static_cast<ptrdiff_t>(n_unwritten), tensor) !=
           unwritten.begin() + static_cast<ptrdiff_t>(n_unwritten);
  };
  for (size_t i = 0; i < n_unwritten; ++i) {
    if ((unwritten[i]->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) return;
  }
  for (size_t i = at; i < nodes.size(); ++i) {
    for (const ggml_tensor* source : nodes[i]->src) {
      if (source != nullptr && is_unwritten(source)) return;
    }
  }
  block.down_bias = bias;
  block.weights = weights;
  block.sum = nodes[at - 1];
  block.sum_nodes.assign(nodes.begin() + block.end_node, nodes.begin() + static_cast<ptrdiff_t>(at));
  block.end_node = static_cast<int>(at);
}

}  // namespace

bool is_elementwise(const ggml_tensor* node) {
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

bool is_row_local(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NORM:
    case GGML_OP_RMS_NORM:
    case GGML_OP_L2_NORM: return true;
    default: return is_elementwise(node);
  }
}

void find_moe_block(std::span<ggml_tensor* const> nodes, int begin, ExpertWeightOf weight_of, MoeBlock& block) {
  ggml_tensor* first = nodes[static_cast<size_t>(begin)];
  const ExpertWeight* first_weight = weight_of(first->src[0]);
  make_lone(first, begin, first_weight, "its first matrices are not in this graph", block);
  if (first_weight->role == MatrixRole::kDown) return;

  MoeBlock whole;
  std::swap(whole, block);  // reuse the vectors' memory
  whole.ids = first->src[2];
  whole.x = first->src[1];
  whole.down = nullptr;
  whole.lone_reason = "";
  const char* misfit = nullptr;
  const auto is_inside = [&](const ggml_tensor* tensor) { return contains(whole.first, tensor) || contains(whole.middle, tensor); };
  for (size_t i = static_cast<size_t>(begin); misfit == nullptr && i < nodes.size(); ++i) {
    ggml_tensor* node = nodes[i];
    const ExpertWeight* weight = node->op == GGML_OP_MUL_MAT_ID ? weight_of(node->src[0]) : nullptr;
    if (weight != nullptr) {
      if (weight->owner != first_weight->owner || weight->layer != first_weight->layer || node->src[2] != whole.ids) {
        misfit = "another block's matrix stands inside it";
      } else if (weight->role != MatrixRole::kDown) {
        if (node->src[1] != whole.x) misfit = "its first matrices have different inputs";
        whole.first.push_back(node);
      } else {
        if (!is_inside(node->src[1]) || !has_row_shape(node->src[1], whole)) misfit = "down's input is not computed inside it";
        whole.down = node;
        whole.weight = weight;
        whole.end_node = static_cast<int>(i) + 1;
        break;
      }
      continue;
    }
    const bool depends = std::any_of(std::begin(node->src), std::end(node->src),
                                     [&](const ggml_tensor* source) { return source != nullptr && is_inside(source); });
    if (!depends) {
      whole.outside.push_back(node);
      continue;
    }
    if ((node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) {
      misfit = "a value inside it is an output of the graph";
    } else if (!has_row_shape(node, whole) || !(is_row_local(node) || is_row_slice(node))) {
      misfit = "an operation inside it mixes rows";
    }
    for (int source = 0; misfit == nullptr && source < GGML_MAX_SRC; ++source) {
      if (node->src[source] == nullptr || is_inside(node->src[source])) continue;
      if (!is_usable_operand(node, source, whole)) misfit = "an operand from outside has another shape";
    }
    whole.middle.push_back(node);
  }
  if (misfit == nullptr && whole.down == nullptr) misfit = "the graph ends inside it";
  if (misfit == nullptr && whole.middle.size() > kMiddleNodesMax) misfit = "it has too many operations";
  // What lies in the middle is never written to its own tensor, so nobody after the block may read it.
  for (size_t i = static_cast<size_t>(whole.end_node); misfit == nullptr && i < nodes.size(); ++i) {
    for (const ggml_tensor* source : nodes[i]->src) {
      if (source != nullptr && is_inside(source)) misfit = "a value inside it is read behind it";
    }
  }
  std::swap(whole, block);
  if (misfit == nullptr) {
    find_sum(nodes, block);
  } else {
    make_lone(first, begin, first_weight, misfit, block);
  }
}

}  // namespace sluice
