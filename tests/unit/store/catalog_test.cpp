#include "store/catalog.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::add_dense_ffn;
using test::add_experts;
using test::kFf;
using test::kHidden;
using test::layer_tensor;
using test::plain_model;
using test::TestModel;
using test::TestTensor;

class CatalogTest : public testing::Test {
 protected:
  Result<Catalog> open(const TestModel& model) {
    const std::string path = folder_.file("model.gguf");
    test::write_model(model, path);
    return Catalog::open(path, DirectMode::kOff);
  }

  // The error's text, which must be one line that names the file.
  std::string refusal(const TestModel& model) {
    const auto catalog = open(model);
    if (catalog) return "opened";
    EXPECT_EQ(catalog.error().code, ErrorCode::kBadFile);
    const std::string text = catalog.error().message();
    EXPECT_NE(text.find("model.gguf"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  }

  // Every range holds the bytes that were written under that name.
  static void expect_contents(const TestModel& model, const Catalog& catalog) {
    ASSERT_EQ(catalog.tensors.size(), model.tensors.size());
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      const CatalogTensor& tensor = catalog.tensors[i];
      EXPECT_EQ(tensor.name, model.tensors[i].name);
      const std::vector<uint8_t> wanted = model.tensors[i].data();
      ASSERT_EQ(tensor.range.bytes, wanted.size());
      std::vector<uint8_t> found(wanted.size());
      ASSERT_TRUE(catalog.files[tensor.range.file]->read_exactly(tensor.range.offset, found.data(), found.size()).ok());
      EXPECT_EQ(found, wanted) << tensor.name;
    }
  }

  test::TempFolder folder_;
  test::NoGgmlLog no_ggml_log_;
};

uint64_t bytes_of(const TestModel& model, bool experts) {
  uint64_t sum = 0;
  for (const TestTensor& tensor : model.tensors) {
    if (parse_expert_tensor_name(tensor.name).has_value() == experts) sum += tensor.bytes();
  }
  return sum;
}

TEST_F(CatalogTest, PlainModel) {
  const TestModel model = plain_model();
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->architecture, "qwen3moe");
  EXPECT_EQ(catalog->name, "Test Model");
  EXPECT_EQ(catalog->n_layer, 2u);
  EXPECT_EQ(catalog->n_layer_nextn, 0u);
  EXPECT_EQ(catalog->n_expert, 4u);
  EXPECT_EQ(catalog->n_expert_used, 2u);
  EXPECT_EQ(catalog->files.size(), 1u);
  EXPECT_TRUE(catalog->is_moe());
  EXPECT_EQ(catalog->expert_bytes, bytes_of(model, true));
  EXPECT_EQ(catalog->dense_bytes, bytes_of(model, false));
  expect_contents(model, *catalog);

  ASSERT_EQ(catalog->expert_layers.size(), 2u);
  const ExpertLayer& layer = catalog->expert_layers[1];
  EXPECT_EQ(layer.layer, 1u);
  EXPECT_EQ(layer.n_expert, 4u);
  ASSERT_EQ(layer.matrices.size(), 3u);
  EXPECT_EQ(layer.matrices[0].role, MatrixRole::kGate);
  EXPECT_EQ(layer.matrices[1].role, MatrixRole::kUp);
  EXPECT_EQ(layer.matrices[2].role, MatrixRole::kDown);
  const ExpertTensorShape down = {GGML_TYPE_Q8_0, kFf, kHidden, 4, 34 * kHidden};
  EXPECT_EQ(layer.matrices[2].shape, down);
  EXPECT_EQ(layer.record_bytes(), 2 * 2 * 18 * kFf + 34 * kHidden);
  EXPECT_EQ(layer.spans[2].bytes * layer.n_expert, down.total_bytes());
}

TEST_F(CatalogTest, AlignmentOtherThanTheDefault) {
  TestModel model = plain_model();
  for (const uint32_t alignment : {8u, 256u}) {
    model.alignment = alignment;
    const auto catalog = open(model);
    ASSERT_TRUE(catalog.ok()) << catalog.error().message();
    expect_contents(model, *catalog);
  }
}

TEST_F(CatalogTest, FusedGateUpIsOneMatrix) {
  TestModel model;
  model.n_layer = 1;
  model.add(layer_tensor(0, "ffn_gate_up_exps.weight"), GGML_TYPE_Q4_0, {kHidden, 2 * kFf, 4});
  model.add(layer_tensor(0, "ffn_down_exps.weight"), GGML_TYPE_Q4_0, {kFf, kHidden, 4});
  model.add(layer_tensor(0, "ffn_gate_shexp.weight"), GGML_TYPE_Q4_0, {kHidden, kFf});
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  ASSERT_EQ(catalog->expert_layers.size(), 1u);
  const ExpertLayer& layer = catalog->expert_layers[0];
  ASSERT_EQ(layer.matrices.size(), 2u);
  EXPECT_EQ(layer.matrices[0].role, MatrixRole::kGateUp);
  EXPECT_EQ(layer.record_bytes(), 2 * 18 * 2 * kFf + 18 * kHidden);
  EXPECT_EQ(catalog->dense_bytes, static_cast<uint64_t>(2 * 18 * kFf)) << "a shared expert is not routed";
}

TEST_F(CatalogTest, ExpertsWithoutGate) {
  TestModel model;
  model.n_layer = 1;
  model.add(layer_tensor(0, "ffn_up_exps.weight"), GGML_TYPE_Q4_0, {kHidden, kFf, 4});
  model.add(layer_tensor(0, "ffn_down_exps.weight"), GGML_TYPE_Q4_0, {kFf, kHidden, 4});
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->expert_layers[0].matrices.size(), 2u);
}

TEST_F(CatalogTest, SideTensorsInAnyTableOrder) {
  TestModel weights_first;
  weights_first.architecture = "gpt-oss";
  weights_first.n_layer = 1;
  add_experts(weights_first, 0, GGML_TYPE_MXFP4, GGML_TYPE_MXFP4, GGML_TYPE_MXFP4);
  for (const char* role : {"gate", "up", "down"}) {
    const int64_t rows = std::string(role) == "down" ? kHidden : kFf;
    weights_first.add(layer_tensor(0, fmt::format("ffn_{}_exps.bias", role)), GGML_TYPE_F32, {rows, 4});
    weights_first.add(layer_tensor(0, fmt::format("ffn_{}_exps.scale", role)), GGML_TYPE_F32, {4});
    weights_first.add(layer_tensor(0, fmt::format("ffn_{}_exps.input_scale", role)), GGML_TYPE_F32, {4});
  }
  TestModel weights_last = weights_first;
  std::reverse(weights_last.tensors.begin(), weights_last.tensors.end());
  TestModel by_name = weights_first;
  std::sort(by_name.tensors.begin(), by_name.tensors.end(),
            [](const TestTensor& a, const TestTensor& b) { return a.name < b.name; });

  for (const TestModel& model : {weights_first, weights_last, by_name}) {
    const auto catalog = open(model);
    ASSERT_TRUE(catalog.ok()) << catalog.error().message();
    expect_contents(model, *catalog);
    ASSERT_EQ(catalog->expert_layers.size(), 1u);
    const ExpertLayer& layer = catalog->expert_layers[0];
    ASSERT_EQ(layer.matrices.size(), 3u);
    EXPECT_EQ(layer.matrices[0].role, MatrixRole::kGate);
    EXPECT_EQ(layer.matrices[2].role, MatrixRole::kDown);
    EXPECT_EQ(layer.side_tensors.size(), 9u);
    EXPECT_EQ(catalog->expert_bytes, bytes_of(model, true));
    EXPECT_EQ(catalog->dense_bytes, bytes_of(model, false)) << "side tensors are resident";
    for (const ExpertMatrix& matrix : layer.matrices) EXPECT_EQ(matrix.shape.type, GGML_TYPE_MXFP4);
  }
}

TEST_F(CatalogTest, TypesMayDifferByLayerAndMatrix) {
  TestModel model;
  model.n_layer = 2;
  add_experts(model, 0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_0, GGML_TYPE_Q8_0);
  add_experts(model, 1, GGML_TYPE_F16, GGML_TYPE_IQ4_NL, GGML_TYPE_BF16);
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->expert_layers[0].matrices[1].shape.type, GGML_TYPE_Q5_0);
  EXPECT_EQ(catalog->expert_layers[1].matrices[2].shape.type, GGML_TYPE_BF16);
  EXPECT_NE(catalog->expert_layers[0].record_bytes(), catalog->expert_layers[1].record_bytes());
  expect_contents(model, *catalog);
}

TEST_F(CatalogTest, LayersKeepTheirRealNumbers) {
  TestModel model;
  model.n_layer = 6;
  add_dense_ffn(model, 0);
  add_experts(model, 3);  // not in order
  add_experts(model, 1);
  add_dense_ffn(model, 2);
  add_dense_ffn(model, 4);
  add_experts(model, 5);
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "qwen3moe.nextn_predict_layers", 1); };
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  std::vector<uint32_t> layers;
  for (const ExpertLayer& layer : catalog->expert_layers) layers.push_back(layer.layer);
  EXPECT_EQ(layers, (std::vector<uint32_t>{1, 3, 5}));
  EXPECT_EQ(catalog->n_layer, 6u);
  EXPECT_EQ(catalog->n_layer_nextn, 1u);
}

TEST_F(CatalogTest, NextnLayerAnnouncedWithoutTensors) {
  TestModel model = plain_model();
  model.n_layer = 3;
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "qwen3moe.nextn_predict_layers", 1); };
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->expert_layers.size(), 2u);
}

TEST_F(CatalogTest, DenseModel) {
  TestModel model;
  model.architecture = "llama";
  model.n_layer = 1;
  model.n_expert = 0;
  model.n_expert_used = 0;
  add_dense_ffn(model, 0);
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_FALSE(catalog->is_moe());
  EXPECT_EQ(catalog->n_expert, 0u);
  EXPECT_EQ(catalog->expert_bytes, 0u);
}

TEST_F(CatalogTest, CountsMayBeArraysPerLayerOrOtherIntegerTypes) {
  TestModel model = plain_model();
  model.more_keys = [](gguf_context* context) {
    const uint32_t used[] = {1, 3};
    gguf_set_arr_data(context, "qwen3moe.expert_used_count", GGUF_TYPE_UINT32, used, 2);
    gguf_set_val_i64(context, "qwen3moe.expert_count", 4);
  };
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->n_expert_used, 3u);
  EXPECT_EQ(catalog->n_expert, 4u);
}

TEST_F(CatalogTest, OneExpertAndManyExperts) {
  for (const uint32_t n_expert : {2u, 513u, 1024u}) {
    TestModel model;
    model.n_layer = 1;
    model.n_expert = n_expert;
    model.n_expert_used = n_expert;
    add_experts(model, 0);
    const auto catalog = open(model);
    ASSERT_TRUE(catalog.ok()) << catalog.error().message();
    EXPECT_EQ(catalog->expert_layers[0].n_expert, n_expert);
  }
  // One expert: ggml drops the last dimension of 1.
  TestModel model;
  model.n_layer = 1;
  model.n_expert = 1;
  model.n_expert_used = 1;
  add_experts(model, 0);
  const auto catalog = open(model);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  EXPECT_EQ(catalog->expert_layers[0].n_expert, 1u);
}

TEST_F(CatalogTest, RefusesLayersThatAreNoFfn) {
  const auto with = [](const std::vector<TestTensor>& tensors) {
    TestModel model;
    model.n_layer = 1;
    model.tensors = tensors;
    return model;
  };
  const TestTensor gate = {"blk.0.ffn_gate_exps.weight", GGML_TYPE_F32, {kHidden, kFf, 4}};
  const TestTensor up = {"blk.0.ffn_up_exps.weight", GGML_TYPE_F32, {kHidden, kFf, 4}};
  const TestTensor fused = {"blk.0.ffn_gate_up_exps.weight", GGML_TYPE_F32, {kHidden, 2 * kFf, 4}};
  const TestTensor down = {"blk.0.ffn_down_exps.weight", GGML_TYPE_F32, {kFf, kHidden, 4}};
  const auto changed = [](TestTensor tensor, std::vector<int64_t> ne) {
    tensor.ne = std::move(ne);
    return tensor;
  };
  ASSERT_EQ(refusal(with({gate, up, down})), "opened");

  EXPECT_NE(refusal(with({gate, up})).find("layer 0: ffn_down_exps is missing"), std::string::npos);
  EXPECT_NE(refusal(with({gate, down})).find("neither ffn_up_exps nor"), std::string::npos);
  EXPECT_NE(refusal(with({fused, up, down})).find("stands beside"), std::string::npos);
  EXPECT_NE(refusal(with({gate, changed(up, {kHidden, kFf, 3}), down})).find("has 3 experts"), std::string::npos);
  EXPECT_NE(refusal(with({gate, changed(up, {kHidden, kFf + 1, 4}), down})).find("ffn_up_exps is 64 x 33"),
            std::string::npos);
  EXPECT_NE(refusal(with({gate, up, changed(down, {kFf, kHidden + 1, 4})})).find("does not fit"), std::string::npos);
  EXPECT_NE(refusal(with({changed(fused, {kHidden, kFf, 4}), down})).find("does not fit"), std::string::npos);
  EXPECT_NE(refusal(with({changed(fused, {kHidden, 2 * kFf + 1, 4}), down})).find("does not fit"), std::string::npos);
  EXPECT_NE(refusal(with({gate, up, changed(down, {kFf, kHidden, 4, 2})})).find("4 dimensions"), std::string::npos);
  TestTensor again = up;
  again.name = "blk.00.ffn_up_exps.weight";
  EXPECT_NE(refusal(with({gate, up, again, down})).find("two tensors ffn_up_exps"), std::string::npos);
}

TEST_F(CatalogTest, RefusesMetadataThatContradictsTheTensors) {
  TestModel model = plain_model();
  model.n_layer = 1;
  EXPECT_NE(refusal(model).find("layer 1: has experts, but block_count is 1"), std::string::npos);

  model = plain_model();
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "qwen3moe.expert_count", 3); };
  EXPECT_NE(refusal(model).find("has 4 experts, but expert_count is 3"), std::string::npos);
}

TEST_F(CatalogTest, RefusesImpossibleCounts) {
  const auto with_key = [](const char* key, uint32_t value) {
    TestModel model = plain_model();
    model.more_keys = [=](gguf_context* context) {
      gguf_set_val_u32(context, fmt::format("qwen3moe.{}", key).c_str(), value);
    };
    return model;
  };
  EXPECT_NE(refusal(with_key("expert_used_count", 5)).find("expert_used_count is 5, with 4"), std::string::npos);
  EXPECT_NE(refusal(with_key("expert_used_count", 0)).find("expert_used_count is 0"), std::string::npos);
  EXPECT_NE(refusal(with_key("expert_group_count", 3)).find("expert_group_count is 3"), std::string::npos);
  EXPECT_NE(refusal(with_key("expert_group_count", 4)).find("expert_group_count is 4"), std::string::npos);
  EXPECT_NE(refusal(with_key("expert_group_count", 2)).find("expert_group_used_count is 0"), std::string::npos);
  EXPECT_NE(refusal(with_key("block_count", 0)).find("block_count"), std::string::npos);
  EXPECT_NE(refusal(with_key("block_count", UINT32_MAX)).find("block_count"), std::string::npos);
  EXPECT_NE(refusal(with_key("nextn_predict_layers", 3)).find("nextn_predict_layers is 3"), std::string::npos);
  EXPECT_EQ(refusal(with_key("expert_group_count", 1)), "opened");
}

TEST_F(CatalogTest, RefusesKeysOfTheWrongType) {
  TestModel model = plain_model();
  model.more_keys = [](gguf_context* context) { gguf_set_val_f32(context, "qwen3moe.expert_count", 4.0f); };
  EXPECT_NE(refusal(model).find("key 'qwen3moe.expert_count': wanted a whole number"), std::string::npos);
  model.more_keys = [](gguf_context* context) { gguf_set_val_i32(context, "qwen3moe.expert_count", -1); };
  EXPECT_NE(refusal(model).find("not negative"), std::string::npos);
  model.more_keys = [](gguf_context* context) { gguf_set_val_u64(context, "qwen3moe.expert_count", 1ull << 40); };
  EXPECT_NE(refusal(model).find("32 bits"), std::string::npos);
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "general.architecture", 1); };
  EXPECT_NE(refusal(model).find("key 'general.architecture': wanted a text"), std::string::npos);
  model.more_keys = [](gguf_context* context) { gguf_remove_key(context, "general.architecture"); };
  EXPECT_NE(refusal(model).find("'general.architecture' is missing"), std::string::npos);
}

TEST_F(CatalogTest, RefusesAFileWithoutTensors) {
  TestModel model = plain_model();
  model.tensors.clear();
  EXPECT_NE(refusal(model).find("no tensors"), std::string::npos);
}

TEST_F(CatalogTest, AFileThatIsNotThereIsNotFound) {
  const auto catalog = Catalog::open(folder_.file("none.gguf"), DirectMode::kOff);
  ASSERT_FALSE(catalog.ok());
  EXPECT_EQ(catalog.error().code, ErrorCode::kNotFound);
  EXPECT_NE(catalog.error().message().find("none.gguf"), std::string::npos);
}

}  // namespace
}  // namespace sluice
