#include "cli/probe_report.h"

#include <gtest/gtest.h>

#include <vector>

namespace sluice {
namespace {

TEST(ProbeReport, OneRowForALayerAndTheMeanOfThoseThatAViewSees) {
  const std::vector<RecallCounts> recall = {
      {PredictionView::kLastToken, 0, 2, 10, 1, 2, 3},
      {PredictionView::kBeforeAttention, 1, 3, 10, 8, 9, 10},
      {PredictionView::kLastToken, 0, 3, 10, 3, 4, 5},
  };
  EXPECT_EQ(format_recall(recall, 8),
            "| layer | before attention, 1 ahead @8 | before attention, 1 ahead @12 | before attention, 1 ahead @16 |"
            " last token @8 | last token @12 | last token @16 |\n"
            "| --- | --- | --- | --- | --- | --- | --- |\n"
            "| 2 | - | - | - | 0.100 | 0.200 | 0.300 |\n"
            "| 3 | 0.800 | 0.900 | 1.000 | 0.300 | 0.400 | 0.500 |\n"
            "| mean | 0.800 | 0.900 | 1.000 | 0.200 | 0.300 | 0.400 |\n");
}

}  // namespace
}  // namespace sluice
