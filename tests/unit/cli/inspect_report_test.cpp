#include "cli/inspect_report.h"

#include <gtest/gtest.h>

#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::TestModel;

class InspectReportTest : public testing::Test {
 protected:
  Catalog open(const TestModel& model) {
    test::write_model(model, path());
    auto catalog = Catalog::open(path(), DirectMode::kOff);
    EXPECT_TRUE(catalog.ok()) << (catalog ? "" : catalog.error().message());
    return catalog ? *catalog : Catalog{};
  }
  std::string path() const { return folder_.file("model.gguf"); }

  test::TempFolder folder_;
};

// Layer 0 dense, 1 and 2 alike, 3 of other types with side tensors and nextn.
TestModel mixed_model() {
  TestModel model;
  model.architecture = "glm4moe";
  model.n_layer = 4;
  test::add_dense_ffn(model, 0);
  test::add_experts(model, 1);
  test::add_experts(model, 2);
  test::add_experts(model, 3, GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16);
  model.add("blk.3.ffn_up_exps.bias", GGML_TYPE_F32, {test::kFf, 4});
  model.more_keys = [](gguf_context* context) { gguf_set_val_u32(context, "glm4moe.nextn_predict_layers", 1); };
  return model;
}

TEST_F(InspectReportTest, TextInColumns) {
  const Catalog catalog = open(mixed_model());
  const uint64_t file_bytes = catalog.files.front()->size_bytes();
  const std::string wanted = fmt::format(
      "name             Test Model\n"
      "architecture     glm4moe\n"
      "files            1, {}\n"
      "                 {}\n"
      "layers           4: dense 0; MoE 1-3; nextn 3\n"
      "experts          4, top-k 2\n"
      "expert bytes     83.0 KiB (94.3 %), streamed\n"
      "dense bytes      5.00 KiB (5.7 %), resident\n"
      "                 512 B of them side tensors\n"
      "smallest budget  1.00 MiB\n"
      "\n"
      "MoE layers  experts  one expert  each layer  matrices (in x out)\n"
      "1-2         4        4.38 KiB    17.5 KiB    gate q4_0 64x32, up q4_0 64x32, down q8_0 32x64\n"
      "3           4        12.0 KiB    48.0 KiB    gate f16 64x32, up f16 64x32, down f16 32x64\n"
      "\n"
      "side tensors (resident)  all layers  layers\n"
      "ffn_up_exps.bias         512 B       3\n",
      format_bytes(file_bytes), path());
  EXPECT_EQ(inspect_text(catalog, kMiB), wanted);
}

TEST_F(InspectReportTest, JsonHasEveryFigure) {
  const Catalog catalog = open(mixed_model());
  const nlohmann::json json = inspect_json(catalog, kMiB);
  EXPECT_EQ(json["name"], "Test Model");
  EXPECT_EQ(json["architecture"], "glm4moe");
  EXPECT_EQ(json["moe"], true);
  EXPECT_EQ(json["files"][0]["path"], path());
  EXPECT_EQ(json["files"][0]["bytes"], catalog.files[0]->size_bytes());
  EXPECT_EQ(json["layers"], 4);
  EXPECT_EQ(json["layers_dense"], nlohmann::json({0}));
  EXPECT_EQ(json["layers_moe"], nlohmann::json({1, 2, 3}));
  EXPECT_EQ(json["layers_nextn"], nlohmann::json({3}));
  EXPECT_EQ(json["experts"], 4);
  EXPECT_EQ(json["top_k"], 2);
  EXPECT_EQ(json["expert_bytes"], catalog.expert_bytes);
  EXPECT_EQ(json["dense_bytes"], catalog.dense_bytes);
  EXPECT_EQ(json["side_tensor_bytes"], 512);
  EXPECT_EQ(json["budget_bytes_min"], kMiB);
  const nlohmann::json& layer = json["expert_layers"][2];
  EXPECT_EQ(layer["layer"], 3);
  EXPECT_EQ(layer["experts"], 4);
  EXPECT_EQ(layer["record_bytes"], 12 * kKiB);
  EXPECT_EQ(layer["matrices"][2],
            nlohmann::json({{"role", "down"}, {"type", "f16"}, {"n_in", 32}, {"n_out", 64}, {"slab_bytes", 4096}}));
  EXPECT_EQ(layer["side_tensors"], nlohmann::json({{{"name", "blk.3.ffn_up_exps.bias"}, {"bytes", 512}}}));
  EXPECT_EQ(nlohmann::json::parse(inspect_json_text(json)), json);
}

TEST_F(InspectReportTest, DenseModelSaysSo) {
  TestModel model;
  model.architecture = "llama";
  model.n_layer = 1;
  model.n_expert = 0;
  test::add_dense_ffn(model, 0);
  const Catalog catalog = open(model);
  const std::string text = inspect_text(catalog, 0);
  EXPECT_NE(text.find("\na dense model: there is nothing to stream\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("budget"), std::string::npos) << text;
  const nlohmann::json json = inspect_json(catalog, 0);
  EXPECT_EQ(json["moe"], false);
  EXPECT_TRUE(json["budget_bytes_min"].is_null());
}

TEST_F(InspectReportTest, ExpertsInAnOldFormAreNotCalledDense) {
  TestModel model;
  model.n_layer = 1;
  test::add_dense_ffn(model, 0);
  const std::string text = inspect_text(open(model), 0);
  EXPECT_NE(text.find("4 experts, but no blk.N.ffn_*_exps.weight tensors"), std::string::npos) << text;
}

TEST_F(InspectReportTest, NamesCannotBreakTheOutput) {
  TestModel model = mixed_model();
  model.more_keys = [](gguf_context* context) { gguf_set_val_str(context, "general.name", "a\nb\x1b[31m\xff"); };
  const Catalog catalog = open(model);
  EXPECT_EQ(inspect_text(catalog, 0).find("name             a?b?[31m\xff\n"), 0u);
  const nlohmann::json json = nlohmann::json::parse(inspect_json_text(inspect_json(catalog, 0)));
  EXPECT_EQ(json["name"], "a\nb\x1b[31m\xef\xbf\xbd");
}

TEST(NumberRangesTest, JoinsNeighbours) {
  EXPECT_EQ(number_ranges({}), "");
  EXPECT_EQ(number_ranges({4}), "4");
  EXPECT_EQ(number_ranges({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
}

}  // namespace
}  // namespace sluice
