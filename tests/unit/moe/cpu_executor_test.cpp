#include "moe/cpu_executor.h"

#include <algorithm>
#include <numeric>

#include "moe_fixture.h"

namespace sluice {
namespace {

using Middle = BlockShape::Middle;

std::vector<float> reference(const BlockShape& shape, unsigned seed) {
  BlockGraph block(shape, seed);
  ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  EXPECT_EQ(ggml_backend_graph_compute(cpu, block.graph), GGML_STATUS_SUCCESS);
  ggml_backend_free(cpu);
  return block.result_values();
}

// The same graph through find_moe_block and the executor, experts in a random order in groups of random size.
std::vector<float> streamed(const BlockShape& shape, unsigned seed, int n_threads, unsigned order_seed) {
  BlockGraph block_graph(shape, seed);
  block_graph.describe_weights(true);
  auto executor = std::move(CpuExecutor::create()).value();
  executor->set_threads(n_threads);
  std::mt19937 random(order_seed);
  std::vector<ggml_tensor*> nodes(ggml_graph_nodes(block_graph.graph),
                                  ggml_graph_nodes(block_graph.graph) + ggml_graph_n_nodes(block_graph.graph));
  MoeBlock block;
  Routing routing;
  int blocks = 0;
  for (int at = 0; at < static_cast<int>(nodes.size());) {
    ggml_tensor* node = nodes[static_cast<size_t>(at)];
    if (node->op != GGML_OP_MUL_MAT_ID) {
      EXPECT_TRUE(executor->compute_nodes(std::span(&node, 1)).ok());
      ++at;
      continue;
    }
    find_moe_block(nodes, at, described_weight, block);
    EXPECT_FALSE(block.first.empty()) << "the whole block should have been found";
    EXPECT_EQ(block.outside.size(), shape.scales ? 1u : 0u);
    EXPECT_EQ(block.sum, shape.top_k > 1 ? block_graph.result : nullptr);
    EXPECT_EQ(block.down_bias != nullptr, shape.top_k > 1 && shape.biases);
    EXPECT_TRUE(routing.set(block.ids, static_cast<uint32_t>(shape.n_expert)).ok());
    EXPECT_TRUE(executor->begin_block(block, routing).ok());
    std::vector<ReadyExpert> experts;
    for (uint32_t i = 0; i < routing.experts().size(); ++i) experts.push_back(block_graph.ready(i, routing.experts()[i]));
    std::shuffle(experts.begin(), experts.end(), random);
    for (size_t i = 0; i < experts.size();) {
      const size_t n = std::min<size_t>(experts.size() - i, 1 + random() % 4);
      EXPECT_TRUE(executor->compute(std::span(experts).subspan(i, n)).ok());
      i += n;
    }
    at = block.end_node;
    ++blocks;
  }
  EXPECT_EQ(blocks, 1);
  return block_graph.result_values();
}

void expect_equal_bits(const BlockShape& shape, unsigned seed) {
  SCOPED_TRACE(testing::PrintToString(shape));
  const std::vector<float> expected = reference(shape, seed);
  float largest = 0;
  for (const float value : expected) largest = std::max(largest, std::abs(value));
  ASSERT_GT(largest, 0.0f);
  for (const int n_threads : {1, 2}) {
    const std::vector<float> given = streamed(shape, seed, n_threads, seed * 31 + static_cast<unsigned>(n_threads));
    ASSERT_EQ(given.size(), expected.size());
    for (size_t i = 0; i < given.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(given[i]), std::bit_cast<uint32_t>(expected[i]))
          << "value " << i << ": " << given[i] << " instead of " << expected[i] << ", " << n_threads << " threads";
    }
  }
}

class EveryType : public testing::TestWithParam<ggml_type> {};

TEST_P(EveryType, EqualsTheWholeTensorBitForBit) {
  for (const int64_t n_token : {1, 2, 9, 70}) {
    expect_equal_bits({.gate_type = GetParam(), .down_type = GetParam(), .n_token = n_token}, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EveryType,
                         testing::Values(GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
                                         GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K,
                                         GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S,
                                         GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S, GGML_TYPE_IQ1_S, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS,
                                         GGML_TYPE_MXFP4, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0),
                         [](const auto& test) { return std::string(ggml_type_name(test.param)); });

TEST(CpuExecutor, MixedTypesWithDifferentDotTypes) {
  expect_equal_bits({.gate_type = GGML_TYPE_Q4_K, .down_type = GGML_TYPE_Q8_0, .n_token = 40}, 2);
  expect_equal_bits({.gate_type = GGML_TYPE_MXFP4, .down_type = GGML_TYPE_F16, .n_token = 12}, 2);
}

TEST(CpuExecutor, EveryMiddle) {
  for (const Middle middle : {Middle::kSwiglu, Middle::kSwigluOai, Middle::kGeglu, Middle::kReluSquared, Middle::kClampedSilu, Middle::kNone}) {
    for (const int64_t n_token : {1, 33}) {
      expect_equal_bits({.n_token = n_token, .middle = middle}, 3);
      expect_equal_bits({.n_token = n_token, .middle = middle, .biases = true}, 4);
      expect_equal_bits({.n_token = n_token, .middle = middle, .scales = true}, 5);
      if (middle == Middle::kNone) continue;
      expect_equal_bits({.n_token = n_token, .middle = middle, .fused_gate_up = true, .biases = true, .scales = true}, 6);
    }
  }
}

TEST(CpuExecutor, OddSizesAndRepeatedExperts) {
  expect_equal_bits({.n_embd = 352, .n_ff = 64, .n_expert = 128, .top_k = 8, .n_token = 30}, 7);  // rows of odd block counts
  expect_equal_bits({.n_embd = 64, .n_ff = 32, .n_expert = 2, .top_k = 1, .n_token = 100}, 8);
  expect_equal_bits({.n_embd = 64, .n_ff = 32, .n_expert = 3, .top_k = 3, .n_token = 65}, 9);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 8, .top_k = 4, .n_token = 20, .repeated_ids = true}, 10);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 512, .top_k = 10, .n_token = 600}, 11);
}

// A graph cut short by an evaluation callback ends in the middle of a block: every product is then a block of its own.
TEST(MoeBlock, ACutGraphGivesLoneBlocks) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  std::vector<ggml_tensor*> nodes(ggml_graph_nodes(graph.graph), ggml_graph_nodes(graph.graph) + ggml_graph_n_nodes(graph.graph));
  const auto down = std::find_if(nodes.begin(), nodes.end(), [&](const ggml_tensor* n) { return n->src[0] == graph.down_w; });
  const std::vector<ggml_tensor*> cut(nodes.begin(), down);
  MoeBlock block;
  for (int at = 0; at < static_cast<int>(cut.size()); ++at) {
    if (cut[static_cast<size_t>(at)]->op != GGML_OP_MUL_MAT_ID) continue;
    find_moe_block(cut, at, described_weight, block);
    EXPECT_TRUE(block.first.empty());
    EXPECT_EQ(block.down, cut[static_cast<size_t>(at)]);
    EXPECT_EQ(block.end_node, at + 1);
  }
}

// Somebody who reads what lies inside the block must find it computed.
TEST(MoeBlock, AnOutputInTheMiddleGivesLoneBlocks) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  std::vector<ggml_tensor*> nodes(ggml_graph_nodes(graph.graph), ggml_graph_nodes(graph.graph) + ggml_graph_n_nodes(graph.graph));
  for (ggml_tensor* node : nodes) {
    if (node->op == GGML_OP_GLU) ggml_set_output(node);
  }
  const auto first = std::find_if(nodes.begin(), nodes.end(), [](const ggml_tensor* n) { return n->op == GGML_OP_MUL_MAT_ID; });
  MoeBlock block;
  find_moe_block(nodes, static_cast<int>(first - nodes.begin()), described_weight, block);
  EXPECT_TRUE(block.first.empty());
}

TEST(Routing, RefusesIdsThatAreNoExperts) {
  BlockGraph graph({}, 1);
  Routing routing;
  ASSERT_TRUE(routing.set(graph.ids, 16).ok());
  auto* first = static_cast<int32_t*>(graph.ids->data);
  for (const int32_t bad : {-1, 16, INT32_MAX, INT32_MIN}) {
    const int32_t before = std::exchange(*first, bad);
    const Status status = routing.set(graph.ids, 16);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.error().message().find(std::to_string(bad)), std::string::npos);
    *first = before;
  }
  EXPECT_TRUE(routing.set(graph.ids, 16).ok());
}

TEST(Routing, GroupsRowsByExpertInOrder) {
  BlockGraph graph({.n_expert = 6, .top_k = 3, .n_token = 40}, 4);
  Routing routing;
  ASSERT_TRUE(routing.set(graph.ids, 6).ok());
  uint32_t rows = 0;
  for (uint32_t i = 0; i < routing.experts().size(); ++i) {
    const auto of_expert = routing.rows(i);
    EXPECT_TRUE(std::is_sorted(of_expert.begin(), of_expert.end()));
    for (const uint32_t row : of_expert) EXPECT_EQ(routing.id(row), static_cast<int32_t>(routing.experts()[i]));
    rows += static_cast<uint32_t>(of_expert.size());
  }
  EXPECT_EQ(rows, routing.n_row());
  EXPECT_EQ(rows, 120u);
}

}  // namespace
}  // namespace sluice
