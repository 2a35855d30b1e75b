#include "store/router_weights.h"

#include <gtest/gtest.h>

#include <cstring>

#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::kHidden;
using test::layer_tensor;
using test::plain_model;
using test::TestModel;
using test::TestTensor;

class RouterWeightsTest : public testing::Test {
 protected:
  Result<RouterWeights> read(const TestModel& model, uint32_t layer) {
    const std::string path = folder_.file("model.gguf");
    test::write_model(model, path);
    const auto catalog = Catalog::open(path, DirectMode::kOff);
    EXPECT_TRUE(catalog.ok());
    return read_router_weights(*catalog, layer);
  }
  static bool holds(const std::vector<float>& values, const TestModel& model, const std::string& name) {
    for (const TestTensor& tensor : model.tensors) {
      if (tensor.name != name) continue;
      const auto bytes = tensor.data();
      return bytes.size() == values.size() * sizeof(float) &&
             std::memcmp(bytes.data(), values.data(), bytes.size()) == 0;
    }
    return false;
  }

  test::TempFolder folder_;
};

TEST_F(RouterWeightsTest, ReadsMatrixNormBiasesAndSettings) {
  TestModel model = plain_model();
  model.add("blk.1.ffn_gate_inp.bias", GGML_TYPE_F32, {model.n_expert});
  model.add("blk.1.exp_probs_b.bias", GGML_TYPE_F32, {model.n_expert});
  model.more_keys = [](gguf_context* context) {
    gguf_set_val_f32(context, "qwen3moe.attention.layer_norm_rms_epsilon", 0.25f);
    gguf_set_val_u32(context, "qwen3moe.expert_group_count", 2);
    gguf_set_val_u32(context, "qwen3moe.expert_group_used_count", 1);
  };
  const auto weights = read(model, 1);
  ASSERT_TRUE(weights.ok()) << weights.error().message();
  EXPECT_EQ(weights->n_embd, kHidden);
  EXPECT_EQ(weights->n_expert, model.n_expert);
  EXPECT_EQ(weights->top_k, model.n_expert_used);
  EXPECT_TRUE(holds(weights->matrix, model, "blk.1.ffn_gate_inp.weight"));
  EXPECT_TRUE(holds(weights->norm_weight, model, "blk.1.ffn_norm.weight"));
  EXPECT_TRUE(holds(weights->bias, model, "blk.1.ffn_gate_inp.bias"));
  EXPECT_TRUE(holds(weights->selection_bias, model, "blk.1.exp_probs_b.bias"));
  EXPECT_EQ(weights->epsilon, 0.25f);
  EXPECT_FALSE(weights->layer_norm);
  EXPECT_EQ(weights->score, RouterScore::kSigmoid);  // a selection bias, and no word of the score
  EXPECT_EQ(weights->n_group, 2u);
  EXPECT_EQ(weights->n_group_used, 1u);
}

TEST_F(RouterWeightsTest, TakesThePostAttentionNormAndTheStatedScore) {
  TestModel model = plain_model();
  for (TestTensor& tensor : model.tensors) {
    if (tensor.name == "blk.0.ffn_norm.weight") tensor.name = "blk.0.post_attention_norm.weight";
  }
  model.more_keys = [](gguf_context* context) {
    gguf_set_val_u32(context, "qwen3moe.expert_gating_func", 3);
    gguf_set_val_f32(context, "qwen3moe.attention.layer_norm_epsilon", 0.5f);
  };
  const auto weights = read(model, 0);
  ASSERT_TRUE(weights.ok()) << weights.error().message();
  EXPECT_TRUE(holds(weights->norm_weight, model, "blk.0.post_attention_norm.weight"));
  EXPECT_EQ(weights->score, RouterScore::kSoftmaxOfTopK);
  EXPECT_TRUE(weights->layer_norm);
}

TEST_F(RouterWeightsTest, SaysWhatIsMissingOrUnknown) {
  TestModel model = plain_model();
  EXPECT_EQ(read(model, 7).error().code, ErrorCode::kNotFound);
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "qwen3moe.expert_gating_func", 99); };
  EXPECT_EQ(read(model, 0).error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace sluice
