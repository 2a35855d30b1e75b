// Experts that are holes with their guards compute no number: seen with ggml's own kernels, as an engine without sluice
// has them.
#include "store/hole_guard.h"

#include <cmath>
#include <cstring>

#include "moe_fixture.h"

namespace sluice {
namespace {

void guard(ggml_tensor* weight, MatrixRole role) {
  const ExpertTensorShape shape{weight->type, weight->ne[0], weight->ne[1], weight->ne[2], weight->nb[2]};
  std::memset(weight->data, 0, ggml_nbytes(weight));
  for (const GuardPatch& patch : hole_guard(role, shape)) {
    ASSERT_LE(patch.offset + patch.bytes.size(), shape.slab_bytes);
    for (int64_t expert = 0; expert < shape.n_expert; ++expert) {
      std::memcpy(static_cast<char*>(weight->data) + static_cast<uint64_t>(expert) * shape.slab_bytes + patch.offset,
                  patch.bytes.data(), patch.bytes.size());
    }
  }
}

// Of the results of a block over guarded holes, how many tokens have one that is no finite number.
int64_t n_ruined(const BlockShape& shape) {
  BlockGraph graph(shape, 1);
  if (graph.gate_w != nullptr) guard(graph.gate_w, MatrixRole::kGate);
  if (graph.up_w != nullptr) guard(graph.up_w, MatrixRole::kUp);
  if (graph.gate_up_w != nullptr) guard(graph.gate_up_w, MatrixRole::kGateUp);
  guard(graph.down_w, MatrixRole::kDown);
  ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  EXPECT_EQ(ggml_backend_graph_compute(cpu, graph.graph), GGML_STATUS_SUCCESS);
  ggml_backend_free(cpu);
  const std::vector<float> values = graph.result_values();
  int64_t ruined = 0;
  for (int64_t token = 0; token < shape.n_token; ++token) {
    const auto row = values.begin() + token * shape.n_embd;
    ruined += std::any_of(row, row + shape.n_embd, [](float value) { return !std::isfinite(value); });
  }
  return ruined;
}

constexpr ggml_type kTypes[] = {
    GGML_TYPE_F32,   GGML_TYPE_F16,     GGML_TYPE_BF16,   GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,    GGML_TYPE_Q5_0,
    GGML_TYPE_Q5_1,  GGML_TYPE_Q8_0,    GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,   GGML_TYPE_Q4_K,    GGML_TYPE_Q5_K,
    GGML_TYPE_Q6_K,  GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S,  GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S,
    GGML_TYPE_IQ1_S, GGML_TYPE_IQ1_M,   GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_TQ1_0,   GGML_TYPE_TQ2_0,
    GGML_TYPE_Q1_0,  GGML_TYPE_Q2_0,    GGML_TYPE_MXFP4};

TEST(HoleGuard, EveryTypeRuinsEveryToken) {
  for (const ggml_type type : kTypes) {
    const BlockShape shape{.gate_type = type, .down_type = type, .n_expert = 4, .top_k = 2, .n_token = 20};
    EXPECT_EQ(n_ruined(shape), shape.n_token) << ggml_type_name(type);
  }
}

TEST(HoleGuard, FusedTensorsAndClampedActivationsDoNotHideIt) {
  for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_MXFP4}) {
    for (const auto middle :
         {BlockShape::Middle::kSwiglu, BlockShape::Middle::kSwigluOai, BlockShape::Middle::kGeglu}) {
      for (const bool fused : {false, true}) {
        const BlockShape shape{.gate_type = type,
                               .down_type = type,
                               .n_token = 20,
                               .middle = middle,
                               .fused_gate_up = fused,
                               .biases = true};
        EXPECT_EQ(n_ruined(shape), shape.n_token)
            << ggml_type_name(type) << " middle " << static_cast<int>(middle) << (fused ? ", fused" : "");
      }
    }
  }
}

// Its largest number is not always enough; attention carries what one token has to all that follow.
TEST(HoleGuard, Nvfp4RuinsMostTokens) {
  for (const bool fused : {false, true}) {
    const BlockShape shape{
        .gate_type = GGML_TYPE_NVFP4, .down_type = GGML_TYPE_NVFP4, .n_token = 50, .fused_gate_up = fused};
    EXPECT_GT(n_ruined(shape), shape.n_token * 3 / 4);
  }
}

}  // namespace
}  // namespace sluice
