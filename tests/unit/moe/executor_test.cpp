#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <numeric>

#include "base/log.h"
#include "ggml-backend-impl.h"
#include "moe/block_executor.h"
#include "moe/fused_executor.h"
#include "moe/generic_executor.h"
#include "moe/native_layout.h"
#include "moe_fixture.h"

namespace sluice {
namespace {

using Middle = BlockShape::Middle;

std::vector<float> reference(BlockGraph& graph) {
  static ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  EXPECT_EQ(ggml_backend_graph_compute(cpu, graph.graph), GGML_STATUS_SUCCESS);
  return graph.result_values();
}

// The graph through find_moe_block and an executor, experts in a random order in groups of random size.
Status compute_streamed(BlockGraph& graph, const BlockShape& shape, ExpertExecutor& executor, unsigned order_seed) {
  graph.forget_results();
  graph.describe_weights(true);
  std::mt19937 random(order_seed);
  const std::vector<ggml_tensor*> nodes = graph.nodes();
  MoeBlock block;
  Routing routing;
  int blocks = 0;
  for (int at = 0; at < static_cast<int>(nodes.size());) {
    ggml_tensor* node = nodes[static_cast<size_t>(at)];
    if (node->op != GGML_OP_MUL_MAT_ID) {
      if (Status status = executor.compute_nodes(std::span(&node, 1)); !status) return status;
      ++at;
      continue;
    }
    find_moe_block(nodes, at, described_weight, block);
    EXPECT_FALSE(block.first.empty()) << "the whole block should have been found";
    EXPECT_EQ(block.outside.size(), shape.scales ? 1u : 0u);
    const bool has_sum = shape.top_k > 1 && shape.compute_sum;
    EXPECT_EQ(block.sum, has_sum ? graph.result : nullptr);
    EXPECT_EQ(block.sum_nodes.empty(), !has_sum);
    EXPECT_EQ(block.down_bias != nullptr, has_sum && shape.biases);
    if (Status status = routing.set(block.ids, static_cast<uint32_t>(shape.n_expert)); !status) return status;
    if (Status status = executor.begin_block(block, routing); !status) return status;
    std::vector<ReadyExpert> experts;
    for (uint32_t i = 0; i < routing.experts().size(); ++i) experts.push_back(graph.ready(i, routing.experts()[i]));
    std::shuffle(experts.begin(), experts.end(), random);
    const size_t group_max = random() % 2 ? 4 : experts.size();
    for (size_t i = 0; i < experts.size();) {
      const size_t n = std::min<size_t>(experts.size() - i, 1 + random() % group_max);
      if (Status status = executor.compute(std::span(experts).subspan(i, n)); !status) return status;
      i += n;
    }
    at = block.end_node;
    ++blocks;
  }
  EXPECT_EQ(blocks, 1);
  graph.describe_weights(false);
  return {};
}

void expect_same_bits(const std::vector<float>& given, const std::vector<float>& expected, const std::string& who) {
  ASSERT_EQ(given.size(), expected.size());
  for (size_t i = 0; i < given.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(given[i]), std::bit_cast<uint32_t>(expected[i]))
        << who << ", value " << i << ": " << given[i] << " instead of " << expected[i];
  }
}

FusedExecutor& fused() {
  static const auto executor = std::move(FusedExecutor::create()).value();
  return *executor;
}

GenericExecutor& generic() {
  static const auto executor = std::move(GenericExecutor::create()).value();
  return *executor;
}

// Both executors, on one and on two threads, against ggml's operations over the whole tensors.
void expect_equal_bits(const BlockShape& shape, unsigned seed, std::vector<int> threads = {1, 2}) {
  SCOPED_TRACE(testing::PrintToString(shape));
  BlockGraph graph(shape, seed);
  const std::vector<float> expected = reference(graph);
  float largest = 0;
  for (const float value : expected) largest = std::max(largest, std::abs(value));
  ASSERT_GT(largest, 0.0f);
  for (const int n_threads : threads) {
    const std::pair<const char*, ExpertExecutor*> both[] = {{"fused", &fused()}, {"generic", &generic()}};
    for (const auto& [name, executor] : both) {
      executor->set_threads(n_threads);
      const Status status = compute_streamed(graph, shape, *executor, seed * 31 + static_cast<unsigned>(n_threads));
      ASSERT_TRUE(status.ok()) << name << ": " << status.error().message();
      expect_same_bits(graph.result_values(), expected, fmt::format("{}, {} threads", name, n_threads));
    }
  }
}

constexpr ggml_type kTypes[] = {GGML_TYPE_F32,    GGML_TYPE_F16,   GGML_TYPE_BF16,  GGML_TYPE_Q4_0,    GGML_TYPE_Q4_1,   GGML_TYPE_Q5_0,
                                GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,  GGML_TYPE_Q2_K,  GGML_TYPE_Q3_K,    GGML_TYPE_Q4_K,   GGML_TYPE_Q5_K,
                                GGML_TYPE_Q6_K,   GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S, GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S,
                                GGML_TYPE_IQ1_S,  GGML_TYPE_IQ1_M, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4,  GGML_TYPE_NVFP4,
                                GGML_TYPE_TQ1_0,  GGML_TYPE_TQ2_0, GGML_TYPE_Q1_0,  GGML_TYPE_Q2_0};

class EveryType : public testing::TestWithParam<ggml_type> {};

TEST_P(EveryType, EqualsTheWholeTensorBitForBit) {
  for (const int64_t n_token : {1, 2, 9, 70}) {
    expect_equal_bits({.gate_type = GetParam(), .down_type = GetParam(), .n_token = n_token}, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EveryType, testing::ValuesIn(kTypes),
                         [](const auto& test) { return std::string(ggml_type_name(test.param)); });

TEST(Executors, MixedTypesWithDifferentDotTypes) {
  expect_equal_bits({.gate_type = GGML_TYPE_Q4_K, .down_type = GGML_TYPE_Q8_0, .n_token = 40}, 2);
  expect_equal_bits({.gate_type = GGML_TYPE_MXFP4, .down_type = GGML_TYPE_F16, .n_token = 12}, 2);
}

TEST(Executors, EveryMiddle) {
  for (const Middle middle : {Middle::kSwiglu, Middle::kSwigluOai, Middle::kGeglu, Middle::kReluSquared, Middle::kClampedSilu,
                              Middle::kNone, Middle::kNormed}) {
    for (const int64_t n_token : {1, 33}) {
      expect_equal_bits({.n_token = n_token, .middle = middle}, 3);
      expect_equal_bits({.n_token = n_token, .middle = middle, .biases = true}, 4);
      expect_equal_bits({.n_token = n_token, .middle = middle, .scales = true}, 5);
      if (middle == Middle::kNone) continue;
      expect_equal_bits({.n_token = n_token, .middle = middle, .fused_gate_up = true, .biases = true, .scales = true}, 6);
    }
  }
}

TEST(Executors, OddSizesAndRepeatedExperts) {
  expect_equal_bits({.n_embd = 352, .n_ff = 64, .n_expert = 128, .top_k = 8, .n_token = 30}, 7);  // rows of odd block counts
  expect_equal_bits({.n_embd = 64, .n_ff = 32, .n_expert = 2, .top_k = 1, .n_token = 100}, 8);
  expect_equal_bits({.n_embd = 64, .n_ff = 32, .n_expert = 3, .top_k = 3, .n_token = 65}, 9);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 8, .top_k = 4, .n_token = 20, .repeated_ids = true}, 10);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 512, .top_k = 10, .n_token = 600}, 11);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 8, .top_k = 2, .n_token = 9, .input_per_choice = true}, 12);
  expect_equal_bits({.n_embd = 64, .n_ff = 96, .n_expert = 8, .top_k = 2, .n_token = 9, .biases = true, .compute_sum = false}, 13);
}

// Rows of one expert up to a whole large micro-batch.
TEST(Executors, BatchesOfTwoThousandTokens) {
  expect_equal_bits({.n_embd = 64, .n_ff = 32, .n_expert = 2, .top_k = 1, .n_token = 2048}, 14, {2});
  expect_equal_bits({.gate_type = GGML_TYPE_Q4_K, .down_type = GGML_TYPE_Q6_K, .n_expert = 16, .top_k = 2, .n_token = 2048}, 15, {2});
}

// Whatever shape a model may have, from a seed.
TEST(Executors, RandomShapes) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    BlockShape shape;
    shape.gate_type = kTypes[below(std::size(kTypes))];
    shape.down_type = kTypes[below(std::size(kTypes))];
    const int64_t in_block = ggml_blck_size(shape.gate_type);
    const int64_t ff_block = std::max<int64_t>(ggml_blck_size(shape.down_type), 16);
    shape.n_embd = std::max<int64_t>(in_block, 32) * (1 + below(in_block >= 256 ? 2 : 6));
    shape.n_ff = ff_block * (1 + below(ff_block >= 256 ? 2 : 6));
    shape.n_expert = 1 + below(40);
    shape.top_k = 1 + below(std::min<int64_t>(shape.n_expert, 8));
    shape.n_token = below(4) == 0 ? 1 + below(150) : 1 + below(20);
    shape.middle = static_cast<Middle>(below(7));
    shape.fused_gate_up = shape.middle != Middle::kNone && below(3) == 0;
    shape.biases = below(3) == 0;
    shape.scales = below(4) == 0;
    shape.repeated_ids = below(3) == 0;
    shape.input_per_choice = below(5) == 0;
    shape.compute_sum = below(5) != 0;
    expect_equal_bits(shape, seed, {1 + static_cast<int>(seed % 2)});
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// Slabs that lie at no multiple of any alignment but that of their values.
TEST(Executors, SlabsBetweenAlignments) {
  BlockShape shape{.n_embd = 64, .n_ff = 64, .n_expert = 5, .top_k = 2, .n_token = 12};
  BlockGraph graph(shape, 3);
  const std::vector<float> expected = reference(graph);
  graph.shift_slabs(2);
  for (ExpertExecutor* executor : {static_cast<ExpertExecutor*>(&fused()), static_cast<ExpertExecutor*>(&generic())}) {
    executor->set_threads(1);
    ASSERT_TRUE(compute_streamed(graph, shape, *executor, 4).ok());
    expect_same_bits(graph.result_values(), expected, "shifted");
  }
}

// A backend whose buffers are not ordinary memory, as a GPU's: the CPU's kernels behind a device that says so.
class FarBackend {
 public:
  FarBackend() : cpu_(ggml_backend_cpu_init()), backend_(*cpu_), device_(*cpu_->device), type_(*ggml_backend_cpu_buffer_type()) {
    device_.iface.get_props = [](ggml_backend_dev_t, ggml_backend_dev_props* props) {
      *props = {};
      props->name = "far";
    };
    device_.iface.get_buffer_type = [](ggml_backend_dev_t device) { return static_cast<FarBackend*>(device->context)->buffer_type(); };
    device_.context = this;
    type_.iface.is_host = [](ggml_backend_buffer_type_t) { return false; };
    type_.device = &device_;
    backend_.device = &device_;
    ggml_backend_cpu_set_n_threads(cpu_, 1);
  }
  ~FarBackend() { ggml_backend_free(cpu_); }
  FarBackend(const FarBackend&) = delete;

  ggml_backend_t get() { return &backend_; }
  ggml_backend_buffer_type_t buffer_type() { return &type_; }

 private:
  ggml_backend_t cpu_;
  ggml_backend backend_;
  ggml_backend_device device_;
  ggml_backend_buffer_type type_;
};

TEST(GenericExecutor, UploadsWhereSlotsCannotBeWrapped) {
  FarBackend far;
  auto executor = std::move(GenericExecutor::create(far.get())).value();
  for (const BlockShape& shape : {BlockShape{.n_token = 20, .biases = true, .scales = true}, BlockShape{.n_token = 1, .fused_gate_up = true}}) {
    BlockGraph graph(shape, 5);
    const std::vector<float> expected = reference(graph);
    const uint64_t uploaded_before = executor->uploaded_bytes();
    const Status status = compute_streamed(graph, shape, *executor, 5);
    ASSERT_TRUE(status.ok()) << status.error().message();
    expect_same_bits(graph.result_values(), expected, "uploaded");
    EXPECT_GT(executor->uploaded_bytes(), uploaded_before);
  }
  EXPECT_EQ(generic().uploaded_bytes(), 0u) << "the CPU backend reads slots where they are";
}

// Slabs as ggml's repacked kernels want them: both executors use those kernels.
TEST(Executors, NativeSlabs) {
  ggml_backend_register(ggml_backend_cpu_reg());
  const auto native = NativeLayout::create();
  if (!native.ok()) GTEST_SKIP() << native.error().message();
  const BlockShape shape{.n_expert = 6, .top_k = 2, .n_token = 25};
  BlockGraph graph(shape, 6);
  if (!(*native)->applies(graph.shape_of(graph.down_w))) GTEST_SKIP() << "no native layout for q4_0 on this CPU";
  graph.make_native(**native);
  fused().set_threads(2);
  generic().set_threads(2);
  ASSERT_TRUE(compute_streamed(graph, shape, fused(), 6).ok());
  const std::vector<float> by_fused = graph.result_values();
  ASSERT_TRUE(compute_streamed(graph, shape, generic(), 7).ok());
  expect_same_bits(graph.result_values(), by_fused, "native");
  FarBackend far;
  auto executor = std::move(GenericExecutor::create(far.get())).value();
  const Status refused = compute_streamed(graph, shape, *executor, 8);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
}

// ------------------------------------------------------------------------------------------------- choice of executor

struct Chosen {
  Status status;
  ExecutorCounters counters;
};

Chosen choose(const BlockShape& shape, FusedMode mode) {
  auto executor = std::move(BlockExecutor::create()).value();
  executor->set_threads(1);
  executor->set_mode(mode);
  BlockGraph graph(shape, 9);
  const std::vector<float> expected = reference(graph);
  Chosen chosen;
  chosen.status = compute_streamed(graph, shape, *executor, 9);
  chosen.counters = executor->counters();
  if (chosen.status.ok()) expect_same_bits(graph.result_values(), expected, "chosen");
  return chosen;
}

TEST(BlockExecutor, TakesTheFusedWayWhereTheBlockIsOfItsList) {
  for (const FusedMode mode : {FusedMode::kAuto, FusedMode::kRequire}) {
    const Chosen chosen = choose({}, mode);
    EXPECT_TRUE(chosen.status.ok());
    EXPECT_EQ(chosen.counters.fused_blocks, 1u);
    EXPECT_EQ(chosen.counters.generic_blocks, 0u);
    EXPECT_GT(chosen.counters.scatter_ns, 0);
  }
  const Chosen off = choose({}, FusedMode::kOff);
  EXPECT_EQ(off.counters.fused_blocks, 0u);
  EXPECT_EQ(off.counters.generic_blocks, 1u);
  EXPECT_GT(off.counters.scatter_ns, 0);
}

TEST(BlockExecutor, SaysOnceWhyABlockGoesTheGenericWayOrRefusesIt) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  for (int i = 0; i < 2; ++i) {
    const Chosen chosen = choose({.middle = Middle::kNormed}, FusedMode::kAuto);
    EXPECT_TRUE(chosen.status.ok());
    EXPECT_EQ(chosen.counters.fused_blocks, 0u);
    EXPECT_EQ(chosen.counters.generic_blocks, 1u);
  }
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("operation RMS_NORM"), std::string::npos) << lines[0];
  const Chosen required = choose({.middle = Middle::kNormed}, FusedMode::kRequire);
  ASSERT_FALSE(required.status.ok());
  EXPECT_EQ(required.status.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(required.status.error().text, "layer 3: fused computation is required, but this block is not taken: operation RMS_NORM "
                                          "between the matrices is not of its list");
}

TEST(BlockExecutor, CountsLoneProductsAndRefusesThemWhereFusedIsRequired) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  ggml_tensor* first = graph.first_product();
  MoeBlock block;
  Routing routing;
  find_moe_block(std::span(&first, 1), 0, described_weight, block);
  ASSERT_TRUE(routing.set(block.ids, 16).ok());
  auto executor = std::move(BlockExecutor::create()).value();
  set_log_sink([](LogLevel, const std::string&) {});
  for (const FusedMode mode : {FusedMode::kAuto, FusedMode::kOff}) {
    executor->set_mode(mode);
    EXPECT_TRUE(executor->begin_block(block, routing).ok());
  }
  set_log_sink(nullptr);
  EXPECT_EQ(executor->counters().lone_blocks, 2u);
  EXPECT_EQ(executor->counters().fused_blocks + executor->counters().generic_blocks, 0u);
  executor->set_mode(FusedMode::kRequire);
  const Status status = executor->begin_block(block, routing);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().text.find("the graph ends inside it"), std::string::npos) << status.error().text;
}

TEST(BlockExecutor, ParsesItsMode) {
  EXPECT_EQ(*parse_fused_mode("auto"), FusedMode::kAuto);
  EXPECT_EQ(*parse_fused_mode("off"), FusedMode::kOff);
  EXPECT_EQ(*parse_fused_mode("require"), FusedMode::kRequire);
  EXPECT_NE(parse_fused_mode("on").error().text.find("'on'"), std::string::npos);
}

// What the fused executor does not take is found by type too: a weight that ggml has no dot product for.
TEST(FusedExecutor, RefusesTypesWithoutADotProduct) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  const std::vector<ggml_tensor*> nodes = graph.nodes();
  const auto first = std::find(nodes.begin(), nodes.end(), graph.first_product());
  MoeBlock block;
  find_moe_block(nodes, static_cast<int>(first - nodes.begin()), described_weight, block);
  ASSERT_FALSE(block.first.empty());
  EXPECT_EQ(FusedExecutor::refusal(block), "");
  const ggml_type before = std::exchange(graph.down_w->type, GGML_TYPE_Q8_K);
  EXPECT_EQ(FusedExecutor::refusal(block), "type q8_K has no public dot product");
  graph.down_w->type = before;
}

// A graph cut short by an evaluation callback ends in the middle of a block: every product is then a block of its own.
TEST(MoeBlock, ACutGraphGivesLoneBlocks) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  const std::vector<ggml_tensor*> nodes = graph.nodes();
  const auto down = std::find_if(nodes.begin(), nodes.end(), [&](const ggml_tensor* n) { return n->src[0] == graph.down_w; });
  const std::vector<ggml_tensor*> cut(nodes.begin(), down);
  MoeBlock block;
  for (int at = 0; at < static_cast<int>(cut.size()); ++at) {
    if (cut[static_cast<size_t>(at)]->op != GGML_OP_MUL_MAT_ID) continue;
    find_moe_block(cut, at, described_weight, block);
    EXPECT_TRUE(block.first.empty());
    EXPECT_EQ(block.down, cut[static_cast<size_t>(at)]);
    EXPECT_EQ(block.end_node, at + 1);
    EXPECT_STREQ(block.lone_reason, "the graph ends inside it");
  }
}

// Somebody who reads what lies inside the block must find it computed.
TEST(MoeBlock, AnOutputInTheMiddleGivesLoneBlocks) {
  BlockGraph graph({}, 1);
  graph.describe_weights(true);
  const std::vector<ggml_tensor*> nodes = graph.nodes();
  for (ggml_tensor* node : nodes) {
    if (node->op == GGML_OP_GLU) ggml_set_output(node);
  }
  const auto first = std::find_if(nodes.begin(), nodes.end(), [](const ggml_tensor* n) { return n->op == GGML_OP_MUL_MAT_ID; });
  MoeBlock block;
  find_moe_block(nodes, static_cast<int>(first - nodes.begin()), described_weight, block);
  EXPECT_TRUE(block.first.empty());
  EXPECT_STREQ(block.lone_reason, "a value inside it is an output of the graph");
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
