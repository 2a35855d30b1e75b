#include "cli/budget_plan.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>

#include "gguf.h"

namespace sluice {
namespace {

BudgetInputs inputs_of_a_16_gib_machine() {
  return {
      .spec = {.kind = BudgetSpec::Kind::kAuto},
      .available_bytes = 16 * kGiB,
      .dense_bytes = 2 * kGiB,
      .context = {.kv = 512 * kMiB, .compute = 256 * kMiB},
      .expert_bytes = 40 * kGiB,
      .budget_bytes_min = kGiB,
  };
}

TEST(BudgetPlan, AutomaticBudgetIsWhatIsLeft) {
  const Result<BudgetPlan> plan = plan_budget(inputs_of_a_16_gib_machine());
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->reserve_bytes, 16 * kGiB / 20);
  EXPECT_EQ(plan->left_bytes + plan->reserve_bytes + 2 * kGiB + 768 * kMiB, 16 * kGiB) << "the sum must come out";
  EXPECT_EQ(plan->budget_bytes, plan->left_bytes);
  EXPECT_FALSE(budget_exceeds_memory(*plan));
}

TEST(BudgetPlan, AutomaticBudgetIsNeverMoreThanAllExperts) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.expert_bytes = 3 * kGiB;
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->budget_bytes, 3 * kGiB);
}

// Guards against a refusal of models whose experts are so small that the least staging outweighs them.
TEST(BudgetPlan, AllExpertsIsNeverLessThanWhatWorks) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.expert_bytes = 13'824;
  inputs.budget_bytes_min = 19'840;
  for (const BudgetSpec& spec : {BudgetSpec{}, BudgetSpec{.kind = BudgetSpec::Kind::kPercent, .percent = 100}}) {
    inputs.spec = spec;
    const Result<BudgetPlan> plan = plan_budget(inputs);
    ASSERT_TRUE(plan) << plan.error().text;
    EXPECT_EQ(plan->budget_bytes, 19'840u);
  }
  inputs.spec = {.kind = BudgetSpec::Kind::kPercent, .percent = 99};
  EXPECT_FALSE(plan_budget(inputs));
}

TEST(BudgetPlan, SmallMachinesKeepTheSmallestReserve) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.available_bytes = 4 * kGiB;
  inputs.budget_bytes_min = kMiB;
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->reserve_bytes, 256 * kMiB);
  EXPECT_EQ(plan->budget_bytes, kGiB);
}

TEST(BudgetPlan, AContextThatCannotFitIsRefusedWhateverTheBudget) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.context_tokens = 1'000'000;
  inputs.context.kv = 20 * kGiB;
  for (const BudgetSpec& spec : {BudgetSpec{}, BudgetSpec{.kind = BudgetSpec::Kind::kBytes, .bytes = 2 * kGiB}}) {
    inputs.spec = spec;
    const Result<BudgetPlan> plan = plan_budget(inputs);
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, ErrorCode::kNoMemory);
    EXPECT_NE(plan.error().text.find("1000000 tokens"), std::string::npos) << plan.error().text;
    EXPECT_NE(plan.error().text.find("20.0 GiB"), std::string::npos) << plan.error().text;
  }
}

TEST(BudgetPlan, TooLittleIsRefusedWithNeededAndGivenBytes) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.available_bytes = 3 * kGiB;  // dense, context and reserve need more
  const Result<BudgetPlan> automatic = plan_budget(inputs);
  ASSERT_FALSE(automatic);
  EXPECT_EQ(automatic.error().code, ErrorCode::kNoMemory);
  EXPECT_NE(automatic.error().text.find("1073741824 bytes"), std::string::npos) << automatic.error().text;
  EXPECT_NE(automatic.error().text.find("(0 bytes)"), std::string::npos) << automatic.error().text;

  inputs.spec = {.kind = BudgetSpec::Kind::kBytes, .bytes = kGiB - 1};
  const Result<BudgetPlan> given = plan_budget(inputs);
  ASSERT_FALSE(given);
  EXPECT_NE(given.error().text.find("1073741823 bytes"), std::string::npos) << given.error().text;

  inputs.spec.bytes = kGiB;
  inputs.available_bytes = 16 * kGiB;
  EXPECT_TRUE(plan_budget(inputs)) << "exactly the smallest budget works";
}

TEST(BudgetPlan, ShareIsOfTheExperts) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.spec = {.kind = BudgetSpec::Kind::kPercent, .percent = 25};
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->budget_bytes, 10 * kGiB);
}

TEST(BudgetPlan, AskingForMoreThanThereIsIsMadeToFit) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.spec = {.kind = BudgetSpec::Kind::kBytes, .bytes = 15 * kGiB};
  const uint64_t fits = 16 * kGiB - 2 * kGiB - 768 * kMiB - 512 * kMiB;  // a thirty-second stays free
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->budget_bytes, fits);
  EXPECT_EQ(plan->asked_bytes, 15 * kGiB);

  inputs.spec.bytes = fits;
  const Result<BudgetPlan> exactly = plan_budget(inputs);
  ASSERT_TRUE(exactly);
  EXPECT_EQ(exactly->budget_bytes, fits);
  EXPECT_EQ(exactly->asked_bytes, 0u);
  EXPECT_TRUE(budget_exceeds_memory(*exactly)) << "it takes from the reserve";

  inputs.spec.bytes = 15 * kGiB;
  inputs.fit = false;
  const Result<BudgetPlan> taken = plan_budget(inputs);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->budget_bytes, 15 * kGiB);
  EXPECT_TRUE(budget_exceeds_memory(*taken));

  inputs.fit = true;
  inputs.available_bytes = kAvailableUnknown;
  const Result<BudgetPlan> blind = plan_budget(inputs);
  ASSERT_TRUE(blind);
  EXPECT_EQ(blind->budget_bytes, 15 * kGiB);
  EXPECT_FALSE(budget_exceeds_memory(*blind)) << "nothing is known, nothing is claimed";
}

TEST(BudgetPlan, WhatCannotBeMadeToFitIsRefused) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.spec = {.kind = BudgetSpec::Kind::kBytes, .bytes = 2 * kGiB};
  inputs.available_bytes = 2 * kGiB + 768 * kMiB + kGiB;  // the smallest budget would take all that is left
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kNoMemory);
  EXPECT_NE(plan.error().text.find("--fit off"), std::string::npos) << plan.error().text;
  inputs.fit = false;
  EXPECT_TRUE(plan_budget(inputs));
}

TEST(BudgetPlan, ASmallContainerKeepsAnEighthInReserve) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.available_bytes = 400 * kMiB;
  inputs.dense_bytes = 20 * kMiB;
  inputs.context = {.kv = 20 * kMiB, .compute = 10 * kMiB};
  inputs.budget_bytes_min = kMiB;
  const Result<BudgetPlan> plan = plan_budget(inputs);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->reserve_bytes, 50 * kMiB);
  EXPECT_EQ(plan->budget_bytes, 300 * kMiB);
}

TEST(BudgetPlan, TableShowsEveryTerm) {
  const Result<BudgetPlan> plan = plan_budget(inputs_of_a_16_gib_machine());
  ASSERT_TRUE(plan);
  const std::vector<std::string> table = budget_table(*plan);
  const std::string text = std::accumulate(table.begin(), table.end(), std::string());
  for (const uint64_t bytes :
       {16 * kGiB, 2 * kGiB, 512 * kMiB, 256 * kMiB, plan->reserve_bytes, plan->left_bytes, 40 * kGiB}) {
    EXPECT_NE(text.find(format_bytes(bytes)), std::string::npos) << bytes << " in " << text;
  }
}

TEST(ContextBytes, GrowWithTheContextAndTheBatch) {
  const ContextShape shape = {.n_ctx_train = 32768,
                              .n_layer = 48,
                              .n_embd = 2048,
                              .n_head = 32,
                              .kv_values_per_token = 48 * 4 * 256,
                              .n_ff = 6144,
                              .n_ff_expert = 768,
                              .n_expert = 128,
                              .n_expert_used = 8,
                              .n_vocab = 151936};
  EXPECT_EQ(default_context_tokens(shape), 4096u);
  EXPECT_EQ(default_context_tokens({.n_ctx_train = 512}), 512u);
  EXPECT_EQ(default_context_tokens({}), 4096u);

  const ContextBytes base = estimate_context_bytes(shape, 4096, 512);
  EXPECT_EQ(base.kv, 4096u * 48 * 4 * 256 * 2);
  EXPECT_EQ(estimate_context_bytes(shape, 8192, 512).kv, 2 * base.kv);
  EXPECT_GT(estimate_context_bytes(shape, 4096, 1024).compute, base.compute);
  EXPECT_GE(base.compute, 512u * (2048 + 8 * 2048) * 4) << "the chosen experts' outputs alone";
}

// A GGUF of metadata only, removed with the test.
class MetadataFile {
 public:
  MetadataFile()
      : path_(std::filesystem::temp_directory_path() / "sluice_budget_plan_test.gguf"), gguf_(gguf_init_empty()) {
    gguf_set_val_str(gguf_, "general.architecture", "qwen3moe");
  }
  ~MetadataFile() {
    gguf_free(gguf_);
    std::filesystem::remove(path_);
  }
  gguf_context* gguf() { return gguf_; }
  std::string write() {
    gguf_write_to_file(gguf_, path_.c_str(), true);
    return path_;
  }

 private:
  std::filesystem::path path_;
  gguf_context* gguf_;
};

TEST(ContextShape, ReadsScalarsAndHeadDimensions) {
  MetadataFile file;
  gguf_set_val_u32(file.gguf(), "qwen3moe.context_length", 40960);
  gguf_set_val_u32(file.gguf(), "qwen3moe.block_count", 3);
  gguf_set_val_u32(file.gguf(), "qwen3moe.embedding_length", 64);
  gguf_set_val_u32(file.gguf(), "qwen3moe.attention.head_count", 8);
  gguf_set_val_u32(file.gguf(), "qwen3moe.attention.head_count_kv", 2);
  gguf_set_val_u32(file.gguf(), "qwen3moe.attention.key_length", 32);
  const Result<ContextShape> shape = read_context_shape(file.write());
  ASSERT_TRUE(shape);
  EXPECT_EQ(shape->n_ctx_train, 40960u);
  EXPECT_EQ(shape->n_layer, 3u);
  // Keys as the metadata says (32), values by the default, embedding over heads (8).
  EXPECT_EQ(shape->kv_values_per_token, 3u * 2 * (32 + 8));
}

TEST(ContextShape, ReadsHeadsPerLayer) {
  MetadataFile file;
  const uint32_t heads[3] = {4, 0, 2};
  gguf_set_val_u32(file.gguf(), "qwen3moe.block_count", 3);
  gguf_set_val_u32(file.gguf(), "qwen3moe.attention.key_length", 10);
  gguf_set_val_u32(file.gguf(), "qwen3moe.attention.value_length", 6);
  gguf_set_arr_data(file.gguf(), "qwen3moe.attention.head_count_kv", GGUF_TYPE_UINT32, heads, 3);
  const Result<ContextShape> shape = read_context_shape(file.write());
  ASSERT_TRUE(shape);
  EXPECT_EQ(shape->kv_values_per_token, (4u + 0 + 2) * 16);
}

TEST(ContextShape, RefusesWhatIsNoModel) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "sluice_budget_plan_test.txt";
  std::ofstream(path) << "no model at all";
  const Result<ContextShape> shape = read_context_shape(path);
  ASSERT_FALSE(shape);
  EXPECT_EQ(shape.error().code, ErrorCode::kBadFile);
  std::filesystem::remove(path);
}

// ------------------------------------------------------------------------------------------------------- micro-batch

ContextShape shape_of_an_80b_model() {
  return {.n_ctx_train = 262144, .n_layer = 48, .n_embd = 2048, .n_head = 16, .kv_values_per_token = 48 * 1024, .n_ff = 5120,
          .n_ff_expert = 512, .n_expert = 512, .n_expert_used = 10, .n_vocab = 151936};
}

BudgetInputs inputs_for(uint64_t available_bytes) {
  BudgetInputs inputs = inputs_of_a_16_gib_machine();
  inputs.available_bytes = available_bytes;
  inputs.context_tokens = 4096;
  return inputs;
}

TEST(Ubatch, IsLargeWhereThePoolDoesNotHoldAllExpertsAndItsMemoryIsInTheSum) {
  const auto choice = choose_ubatch(inputs_for(16 * kGiB), shape_of_an_80b_model(), 2048);
  ASSERT_TRUE(choice);
  EXPECT_EQ(choice->ubatch_tokens, 2048u);
  EXPECT_EQ(choice->plan.inputs.context.compute, estimate_context_bytes(shape_of_an_80b_model(), 4096, 2048).compute);
  EXPECT_LT(choice->plan.budget_bytes, 40 * kGiB);
  BudgetInputs all = inputs_for(64 * kGiB);
  const auto resident = choose_ubatch(all, shape_of_an_80b_model(), 2048);
  ASSERT_TRUE(resident);
  EXPECT_EQ(resident->plan.budget_bytes, 40 * kGiB);
  EXPECT_EQ(resident->ubatch_tokens, 512u) << "nothing is read, so nothing is saved";
}

TEST(Ubatch, IsNotLargerThanBatchOrContext) {
  const ContextShape shape = shape_of_an_80b_model();
  EXPECT_EQ(choose_ubatch(inputs_for(16 * kGiB), shape, 1024)->ubatch_tokens, 1024u);
  EXPECT_EQ(choose_ubatch(inputs_for(16 * kGiB), shape, 300)->ubatch_tokens, 512u) << "llama.cpp takes the batch then";
  BudgetInputs short_context = inputs_for(16 * kGiB);
  short_context.context_tokens = 1500;
  EXPECT_EQ(choose_ubatch(short_context, shape, 2048)->ubatch_tokens, 1024u);
}

TEST(Ubatch, StaysSmallWhereItWouldCostExpertsTheirMemory) {
  const ContextShape shape = shape_of_an_80b_model();
  bool was_small = false;
  for (uint64_t available = 5 * kGiB; available <= 12 * kGiB; available += 128 * kMiB) {
    const auto choice = choose_ubatch(inputs_for(available), shape, 2048);
    BudgetInputs small = inputs_for(available);
    small.context = estimate_context_bytes(shape, small.context_tokens, 512);
    const auto plan = plan_budget(small);
    ASSERT_EQ(choice.ok(), plan.ok()) << format_bytes(available) << ": what works with a small batch works";
    if (!choice) continue;
    EXPECT_GE(choice->plan.budget_bytes, plan->budget_bytes - plan->budget_bytes / 8);
    was_small = was_small || choice->ubatch_tokens < 2048;
  }
  EXPECT_TRUE(was_small);
  // A budget that was asked for stays; the batch gives way where both do not fit.
  BudgetInputs given = inputs_for(8 * kGiB);
  given.spec = {.kind = BudgetSpec::Kind::kBytes, .bytes = 4 * kGiB};
  EXPECT_EQ(choose_ubatch(given, shape, 2048)->ubatch_tokens, 2048u);
  given.spec.bytes = 4 * kGiB + 896 * kMiB;
  const auto tight = choose_ubatch(given, shape, 2048);
  ASSERT_TRUE(tight);
  EXPECT_EQ(tight->plan.budget_bytes, given.spec.bytes);
  EXPECT_LT(tight->ubatch_tokens, 2048u);
}

}  // namespace
}  // namespace sluice
