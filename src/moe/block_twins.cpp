#include "moe/block_twins.h"

#include <algorithm>
#include <cstring>

namespace sluice {

namespace {

bool is_one_of(const std::vector<ggml_tensor*>& nodes, const ggml_tensor* tensor) {
  return std::find(nodes.begin(), nodes.end(), tensor) != nodes.end();
}

bool is_operand(const MoeBlock& block, const ggml_tensor* node, const ggml_tensor* source) {
  // The bias of ADD_ID is a weight and stays where it is; its ids are the routing's.
  return source != nullptr && node->op != GGML_OP_ADD_ID && !is_one_of(block.first, source) &&
         !is_one_of(block.middle, source);
}

ggml_tensor* middle_operand(const MoeBlock& block, const Routing& routing, const BlockOperands& operands,
                            const ggml_tensor* node, int source, std::span<const uint32_t> rows, Arena& arena,
                            TwinGraph& graph) {
  ggml_tensor* original = node->src[source];
  if (ggml_tensor* twin = graph.twin(original)) return twin;
  const auto n_row = static_cast<int64_t>(rows.size());
  if (node->op == GGML_OP_ADD_ID && source == 1) return graph.side_weight(original);
  if (node->op == GGML_OP_ADD_ID) {
    auto* ids = arena.take_array<int32_t>(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) ids[i] = routing.id(rows[i]);
    return graph.new_operand(GGML_TYPE_I32, 1, n_row, 1, ids);
  }
  SLUICE_ASSERT(is_operand(block, node, original), "{} is no operand", original->name);
  const float* copied = operands.find(original);
  if (original->ne[1] == 1 && original->ne[2] == 1)
    return graph.new_operand(GGML_TYPE_F32, original->ne[0], 1, 1, copied);
  auto* gathered = arena.take_array<float>(rows.size() * static_cast<uint64_t>(original->ne[0]));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t token = rows[i] / routing.top_k();
    const int64_t choice = rows[i] % routing.top_k();
    const int64_t row = (token % original->ne[2]) * original->ne[1] + choice % original->ne[1];
    std::memcpy(gathered + static_cast<int64_t>(i) * original->ne[0], copied + row * original->ne[0],
                static_cast<size_t>(original->ne[0]) * sizeof(float));
  }
  return graph.new_operand(GGML_TYPE_F32, original->ne[0], 1, n_row, gathered);
}

}  // namespace

void BlockOperands::copy_one(const ggml_tensor* source, Arena& arena) {
  auto* to = arena.take_array<float>(static_cast<uint64_t>(ggml_nelements(source)));
  operands_.emplace_back(source, to);
  for (int64_t i2 = 0; i2 < source->ne[2]; ++i2) {
    for (int64_t i1 = 0; i1 < source->ne[1]; ++i1) {
      const char* from = static_cast<const char*>(source->data) + i2 * static_cast<int64_t>(source->nb[2]) +
                         i1 * static_cast<int64_t>(source->nb[1]);
      std::memcpy(to, from, static_cast<size_t>(source->ne[0]) * sizeof(float));
      to += source->ne[0];
    }
  }
}

// Each operand is copied as soon as it is there: the memory of one may be the result's of an outside node that stands
// after its last use, and all of those run before the first use here.
Status BlockOperands::copy(const MoeBlock& block, Arena& arena, ExpertExecutor& executor) {
  operands_.clear();
  for (const ggml_tensor* node : block.middle) {
    for (const ggml_tensor* source : node->src) {
      if (is_operand(block, node, source) && !is_one_of(block.outside, source)) copy_one(source, arena);
    }
  }
  for (ggml_tensor* outside : block.outside) {
    if (Status status = executor.compute_nodes(std::span(&outside, 1)); !status) return status;
    for (const ggml_tensor* node : block.middle) {
      for (const ggml_tensor* source : node->src) {
        if (source == outside && is_operand(block, node, source)) copy_one(source, arena);
      }
    }
  }
  return {};
}

const float* BlockOperands::find(const ggml_tensor* operand) const {
  const auto it =
      std::find_if(operands_.begin(), operands_.end(), [&](const auto& entry) { return entry.first == operand; });
  SLUICE_ASSERT(it != operands_.end(), "operand {} was not copied", operand->name);
  return it->second;
}

ggml_tensor* TwinGraph::twin(const ggml_tensor* original) const {
  for (const auto& [from, to] : twins_) {
    if (from == original) return to;
  }
  return nullptr;
}

ggml_tensor* build_middle(const MoeBlock& block, const Routing& routing, const BlockOperands& operands,
                          std::span<const uint32_t> rows, Arena& arena, TwinGraph& graph) {
  const auto n_row = static_cast<int64_t>(rows.size());
  for (const ggml_tensor* node : block.middle) {
    ggml_tensor* twin = nullptr;
    if (node->op == GGML_OP_VIEW) {
      ggml_tensor* source = graph.twin(node->src[0]);
      twin = ggml_view_3d(graph.ctx(), source, node->ne[0], 1, n_row, source->nb[1], source->nb[2],
                          node->view_offs - node->src[0]->view_offs);
    } else {
      twin = graph.new_result(GGML_TYPE_F32, node->ne[0], 1, n_row);
      twin->op = node->op;
      std::memcpy(twin->op_params, node->op_params, sizeof(twin->op_params));
      for (int source = 0; source < GGML_MAX_SRC; ++source) {
        if (node->src[source] == nullptr) continue;
        twin->src[source] = middle_operand(block, routing, operands, node, source, rows, arena, graph);
      }
      graph.add(twin);
    }
    graph.set_twin(node, twin);
  }
  return graph.twin(block.down->src[1]);
}

}  // namespace sluice
