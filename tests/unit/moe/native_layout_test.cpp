// Blocks over matrices in the native layout give the bits that ggml gives over whole tensors in its CPU_REPACK buffers.
#include "moe/native_layout.h"

#include <algorithm>
#include <map>

#include "moe/fused_executor.h"
#include "moe_fixture.h"

namespace sluice {
namespace {

const NativeLayout& layout() {
  static const std::unique_ptr<NativeLayout> made = [] {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr)
      ggml_backend_register(ggml_backend_cpu_reg());
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);  // a line for each matrix
    return std::move(NativeLayout::create()).value();
  }();
  return *made;
}

ExpertTensorShape shape_of(const ggml_tensor* weight) {
  return {weight->type, weight->ne[0], weight->ne[1], weight->ne[2], weight->nb[2]};
}

constexpr ggml_type kTypes[] = {GGML_TYPE_F32,    GGML_TYPE_F16,    GGML_TYPE_BF16,  GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,
                                GGML_TYPE_Q5_0,   GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,  GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,
                                GGML_TYPE_Q4_K,   GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,  GGML_TYPE_IQ2_XS, GGML_TYPE_IQ3_S,
                                GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4, GGML_TYPE_NVFP4};

std::vector<ggml_tensor*> weights_of(const BlockGraph& graph) {
  std::vector<ggml_tensor*> weights;
  for (ggml_tensor* weight : {graph.gate_w, graph.up_w, graph.gate_up_w, graph.down_w}) {
    if (weight != nullptr) weights.push_back(weight);
  }
  return weights;
}

// Whole tensors, those that have a native layout in a CPU_REPACK buffer: what stock llama.cpp does by default.
std::vector<float> reference(const BlockShape& shape, unsigned seed) {
  BlockGraph block(shape, seed);
  std::vector<ggml_backend_buffer_t> buffers;
  for (ggml_tensor* weight : weights_of(block)) {
    if (!layout().applies(shape_of(weight))) continue;
    const std::vector<char> bytes(static_cast<const char*>(weight->data),
                                  static_cast<const char*>(weight->data) + ggml_nbytes(weight));
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(layout().buffer_type(), bytes.size() + 4096);
    buffers.push_back(buffer);
    weight->buffer = nullptr;
    weight->data = nullptr;
    EXPECT_EQ(ggml_backend_tensor_alloc(buffer, weight, ggml_backend_buffer_get_base(buffer)), GGML_STATUS_SUCCESS);
    EXPECT_NE(weight->extra, nullptr) << weight->name << ": ggml does not repack what the layout says it does";
    ggml_backend_tensor_set(weight, bytes.data(), 0, bytes.size());
  }
  ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  EXPECT_EQ(ggml_backend_graph_compute(cpu, block.graph), GGML_STATUS_SUCCESS);
  ggml_backend_free(cpu);
  for (ggml_backend_buffer_t buffer : buffers) ggml_backend_buffer_free(buffer);
  return block.result_values();
}

// The executor over slabs that lie alone, each made native by itself.
std::vector<float> streamed(const BlockShape& shape, unsigned seed, int n_threads) {
  BlockGraph graph(shape, seed);
  graph.describe_weights(true);
  std::map<const std::byte*, std::vector<std::byte>> native_slabs;
  for (ggml_tensor* weight : weights_of(graph)) {
    const ExpertTensorShape tensor = shape_of(weight);
    if (!layout().applies(tensor)) continue;
    static_cast<ExpertWeight*>(weight->extra)->native = &layout();
    for (int64_t e = 0; e < tensor.n_expert; ++e) {
      const std::byte* slab =
          static_cast<const std::byte*>(weight->data) + static_cast<uint64_t>(e) * tensor.slab_bytes;
      EXPECT_TRUE(
          layout().apply(tensor, slab, (native_slabs[slab] = std::vector<std::byte>(tensor.slab_bytes)).data()).ok());
    }
  }
  auto executor = std::move(FusedExecutor::create()).value();
  executor->set_threads(n_threads);
  std::mt19937 random(seed);
  std::vector<ggml_tensor*> nodes(ggml_graph_nodes(graph.graph),
                                  ggml_graph_nodes(graph.graph) + ggml_graph_n_nodes(graph.graph));
  MoeBlock block;
  Routing routing;
  for (int at = 0; at < static_cast<int>(nodes.size());) {
    ggml_tensor* node = nodes[static_cast<size_t>(at)];
    if (node->op != GGML_OP_MUL_MAT_ID) {
      EXPECT_TRUE(executor->compute_nodes(std::span(&node, 1)).ok());
      ++at;
      continue;
    }
    find_moe_block(nodes, at, described_weight, block);
    EXPECT_TRUE(routing.set(block.ids, static_cast<uint32_t>(shape.n_expert)).ok());
    EXPECT_TRUE(executor->begin_block(block, routing).ok());
    std::vector<ReadyExpert> experts;
    for (uint32_t i = 0; i < routing.experts().size(); ++i) {
      experts.push_back(graph.ready(i, routing.experts()[i]));
      for (const std::byte*& slab : experts.back().slab) {
        if (const auto found = native_slabs.find(slab); found != native_slabs.end()) slab = found->second.data();
      }
    }
    std::shuffle(experts.begin(), experts.end(), random);
    for (size_t i = 0; i < experts.size();) {
      const size_t n = std::min<size_t>(experts.size() - i, 1 + random() % 4);
      EXPECT_TRUE(executor->compute(std::span(experts).subspan(i, n)).ok());
      i += n;
    }
    at = block.end_node;
  }
  return graph.result_values();
}

void expect_equal_bits(const BlockShape& shape, unsigned seed) {
  SCOPED_TRACE(testing::PrintToString(shape));
  const std::vector<float> expected = reference(shape, seed);
  EXPECT_TRUE(std::any_of(expected.begin(), expected.end(), [](float value) { return value != 0; }));
  for (const int n_threads : {1, 2}) {
    const std::vector<float> given = streamed(shape, seed, n_threads);
    ASSERT_EQ(given.size(), expected.size());
    for (size_t i = 0; i < given.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(given[i]), std::bit_cast<uint32_t>(expected[i]))
          << "value " << i << ": " << given[i] << " instead of " << expected[i] << ", " << n_threads << " threads";
    }
  }
}

std::vector<ggml_type> native_types() {
  std::vector<ggml_type> types;
  for (const ggml_type type : kTypes) {
    if (layout().applies({type, 256, 256, 16, ggml_row_size(type, 256) * 256})) types.push_back(type);
  }
  return types;
}

TEST(NativeLayout, HasATagThatNamesTheLibraryAndTheFeatures) {
  EXPECT_TRUE(layout().tag().starts_with(fmt::format("ggml {} ", ggml_version()))) << layout().tag();
  EXPECT_EQ(layout().tag().find("OPENMP"), std::string::npos);
  EXPECT_LE(layout().tag().size(), kPackTagBytesMax);
  EXPECT_EQ(std::move(NativeLayout::create()).value()->tag(), layout().tag());
}

// From one row on: with few experts every one gets from none to all of them.
TEST(NativeLayout, EveryTypeEqualsTheWholeRepackedTensor) {
  const std::vector<ggml_type> types = native_types();
#if defined(__AVX2__) || defined(__ARM_NEON)
  EXPECT_TRUE(std::find(types.begin(), types.end(), GGML_TYPE_Q4_0) != types.end())
      << "this machine should have one for q4_0";
#endif
  for (const ggml_type type : types) {
    for (const int64_t n_token : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40}) {
      expect_equal_bits({.gate_type = type, .down_type = type, .n_expert = 6, .top_k = 2, .n_token = n_token}, 1);
    }
    expect_equal_bits({.gate_type = type, .down_type = type, .n_expert = 1, .top_k = 1, .n_token = 40}, 2);
    expect_equal_bits({.gate_type = type, .down_type = type, .n_expert = 64, .top_k = 8, .n_token = 40, .biases = true},
                      3);
    expect_equal_bits({.gate_type = type, .down_type = type, .n_token = 20, .fused_gate_up = true, .scales = true}, 4);
  }
}

TEST(NativeLayout, MixesWithPlainMatricesInOneBlock) {
  for (const ggml_type native : native_types()) {
    for (const ggml_type plain : {GGML_TYPE_F32, GGML_TYPE_Q5_1, GGML_TYPE_IQ3_S}) {
      if (layout().applies({plain, 256, 256, 16, ggml_row_size(plain, 256) * 256})) continue;
      for (const int64_t n_token : {1, 6, 40}) {
        expect_equal_bits({.gate_type = native, .down_type = plain, .n_token = n_token}, 5);
        expect_equal_bits({.gate_type = plain, .down_type = native, .n_token = n_token, .biases = true}, 6);
      }
    }
  }
}

// Rows that fill no group of interleaved rows have none: then the bytes stay as they are.
TEST(NativeLayout, AppliesToWhatGgmlRepacksAlone) {
  EXPECT_FALSE(layout().applies({GGML_TYPE_F32, 256, 256, 4, 256 * 256 * 4}));
  EXPECT_FALSE(layout().applies({GGML_TYPE_Q4_0, 256, 3, 4, ggml_row_size(GGML_TYPE_Q4_0, 256) * 3}));
}

}  // namespace
}  // namespace sluice
