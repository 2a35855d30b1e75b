#include "loader/slot_plan.h"

#include "loader_fixture.h"

namespace sluice {
namespace {

TEST(SlotPlan, BufferedReadsNeedNoPadding) {
  const auto model = make_test_model({12000}, 16, DirectMode::kOff);
  const SlotPlan plan = plan_layout(model->sources, 4);
  EXPECT_FALSE(plan.layouts[0].staged);
  EXPECT_EQ(plan.staging_bytes, 0u);
  ASSERT_EQ(plan.classes.size(), 1u);
  EXPECT_EQ(plan.classes[0].slot_bytes, 40064u);
  EXPECT_EQ(plan.bytes_min, 4 * 40064u);
  EXPECT_EQ(plan.bytes_all, 16 * 40064u);
}

TEST(SlotPlan, SmallExpertsGoThroughStagingAndLargeOnesDoNot) {
  const auto model = make_test_model({3000, 300000}, 16, DirectMode::kAuto);
  if (!model->sources[0].spans[0].file->direct()) GTEST_SKIP() << "no direct reads here";
  const SlotPlan plan = plan_layout(model->sources, 4);
  EXPECT_TRUE(plan.layouts[0].staged);
  EXPECT_FALSE(plan.layouts[1].staged);
  const uint64_t align = model->sources[0].spans[0].file->align_bytes();
  for (const Region& region : plan.layouts[1].regions) {
    EXPECT_EQ(region.offset % align, 0u);
    EXPECT_EQ(region.bytes % align, 0u);
  }
  EXPECT_EQ(plan.classes[plan.layouts[1].size_class].slot_bytes % 4096, 0u);
}

TEST(SlotPlan, NeverSpendsMoreThanTheBudgetAndAlwaysGivesTheMinimum) {
  const auto model = make_test_model({3000, 30000, 7000}, 32, DirectMode::kAuto);
  const SlotPlan layout = plan_layout(model->sources, 6);
  for (uint64_t budget = layout.bytes_min; budget < layout.bytes_all + 100000; budget += 7919) {
    SlotPlan plan = layout;
    ASSERT_TRUE(plan_slots(plan, budget).ok());
    EXPECT_LE(plan.bytes, budget);
    for (const ClassPlan& size_class : plan.classes) {
      EXPECT_GE(size_class.n_slot, 6u);
      EXPECT_LE(size_class.n_slot, size_class.n_slot_all);
    }
  }
  SlotPlan all = layout;
  ASSERT_TRUE(plan_slots(all, layout.bytes_all).ok());
  for (const ClassPlan& size_class : all.classes) EXPECT_EQ(size_class.n_slot, size_class.n_slot_all);
}

TEST(SlotPlan, BelowTheMinimumSaysWantedAndGiven) {
  const auto model = make_test_model({30000}, 8, DirectMode::kOff);
  SlotPlan plan = plan_layout(model->sources, 2);
  const Status status = plan_slots(plan, plan.bytes_min - 1);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kNoMemory);
  EXPECT_NE(status.error().message().find(std::to_string(plan.bytes_min)), std::string::npos);
  EXPECT_NE(status.error().message().find(std::to_string(plan.bytes_min - 1)), std::string::npos);
}

}  // namespace
}  // namespace sluice
