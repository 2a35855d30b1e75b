#include "cli/report.h"

#include <gtest/gtest.h>

#include <string>

namespace sluice {
namespace {

RunReport streamed_run() {
  EngineStats before, between, after;
  between.experts = {.requests = 100, .hits = 20, .misses = 80, .loads = 80, .bytes_read = 8000};
  after.experts = {.requests = 300, .hits = 200, .misses = 100, .loads = 100, .evictions = 60, .bytes_read = 10000};
  after.streaming = true;
  after.budget_bytes = 5000;
  after.expert_bytes = 20000;
  after.slots = 50;
  after.pool_bytes = 5100;
  after.io_path = "io_uring";
  after.io_direct = true;
  after.io_reads = 100;
  after.io_bytes = 10000;
  after.stall_s = 0.5;
  after.compute_s = 1.5;
  after.layers = {ExpertCounters{}, {.requests = 300, .hits = 200, .misses = 100}};

  RunReport report;
  report.model = "model.gguf";
  report.architecture = "qwen3moe";
  report.threads = 4;
  report.prefill.add(10, 2.0, before, between);
  report.decode.add(20, 4.0, between, after);
  report.generated_tokens = 21;
  report.startup_s = 0.25;
  report.peak_rss_bytes = 123456;
  report.dense_bytes = 777;
  report.engine = after;
  return report;
}

TEST(Report, DrivesAreShownWhenThereAreSeveral) {
  RunReport report = streamed_run();
  EXPECT_EQ(format_report(report, false).find("drives"), std::string::npos);
  EXPECT_TRUE(run_stats_json(report)["io"]["drives"].empty());
  report.engine.io_drives = {{.path = "/fast", .reads = 7, .bytes = 3 << 20, .errors = 0, .mb_per_s = 2000},
                             {.path = "/slow", .reads = 3, .bytes = 1 << 20, .errors = 3, .mb_per_s = 500, .dropped = true}};
  EXPECT_NE(format_report(report, false).find("3.00 MiB from /fast, 1.00 MiB from /slow (dropped)"), std::string::npos)
      << format_report(report, false);
  const nlohmann::json drive = run_stats_json(report)["io"]["drives"][1];
  EXPECT_EQ(drive["path"], "/slow");
  EXPECT_EQ(drive["reads"], 3);
  EXPECT_EQ(drive["bytes"], 1 << 20);
  EXPECT_EQ(drive["errors"], 3);
  EXPECT_EQ(drive["mb_per_s"], 500);
  EXPECT_EQ(drive["dropped"], true);
}

TEST(Report, JsonHasTheKeysOfTheContract) {
  const nlohmann::json json = run_stats_json(streamed_run());
  for (const char* pointer : {"/streaming",
                              "/budget_bytes",
                              "/expert_bytes",
                              "/slots",
                              "/prefill/tokens",
                              "/prefill/seconds",
                              "/prefill/tokens_per_second",
                              "/decode/tokens",
                              "/decode/seconds",
                              "/decode/tokens_per_second",
                              "/experts/requests",
                              "/experts/hits",
                              "/experts/misses",
                              "/experts/hit_rate",
                              "/experts/loads",
                              "/experts/evictions",
                              "/experts/unplaced",
                              "/experts/bytes_read",
                              "/io/path",
                              "/io/direct",
                              "/io/reads",
                              "/io/bytes",
                              "/io/seconds",
                              "/io/retries",
                              "/io/errors",
                              "/prefetch",
                              "/time/route_sync_s",
                              "/time/stall_s",
                              "/time/compute_s",
                              "/memory/peak_rss_bytes",
                              "/memory/pool_bytes",
                              "/memory/dense_bytes",
                              "/startup_s",
                              "/model",
                              "/architecture",
                              "/threads",
                              "/layers"}) {
    EXPECT_TRUE(json.contains(nlohmann::json::json_pointer(pointer))) << pointer;
  }
}

TEST(Report, JsonSplitsThePhases) {
  const nlohmann::json json = run_stats_json(streamed_run());
  EXPECT_EQ(json["prefill"]["tokens"], 10);
  EXPECT_EQ(json["prefill"]["tokens_per_second"], 5.0);
  EXPECT_EQ(json["prefill"]["bytes_read"], 8000);
  EXPECT_EQ(json["prefill"]["hit_rate"], 0.2);
  EXPECT_EQ(json["decode"]["tokens"], 20);
  EXPECT_EQ(json["decode"]["bytes_read"], 2000);
  EXPECT_EQ(json["decode"]["hit_rate"], 180.0 / 200.0);
  EXPECT_EQ(json["generated_tokens"], 21);
  EXPECT_EQ(json["memory"]["peak_rss_bytes"], 123456);
  EXPECT_EQ(json["memory"]["pool_bytes"], 5100);
  EXPECT_EQ(json["memory"]["dense_bytes"], 777);
}

TEST(Report, JsonListsOnlyLayersWithExperts) {
  const nlohmann::json json = run_stats_json(streamed_run());
  ASSERT_EQ(json["layers"].size(), 1u);
  EXPECT_EQ(json["layers"][0]["layer"], 1);
  EXPECT_EQ(json["layers"][0]["hits"], 200);
}

TEST(Report, NoTimeIsNoRate) {
  const nlohmann::json json = run_stats_json({});
  EXPECT_EQ(json["decode"]["tokens_per_second"], 0.0);
  EXPECT_EQ(json["experts"]["hit_rate"], 0.0);
  EXPECT_EQ(json["streaming"], false);
}

TEST(Report, TextTellsTheFiguresOfAStreamedRun) {
  const std::string text = format_report(streamed_run(), false);
  for (const char* part : {"10 tokens in 2.00 s, 5.00 tokens/s", "20 tokens in 4.00 s, 5.00 tokens/s", "50 slots",
                           "66.7 % of 300 requests (prompt 20.0 %, answer 90.0 %)", "io_uring, direct",
                           "per token 800 B (prompt) and 100 B (answer)", "stalled 0.50 s"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << "no colours unless asked";
  EXPECT_NE(format_report(streamed_run(), true).find('\x1b'), std::string::npos);
}

TEST(Report, TextOfADenseRunHasNoExperts) {
  RunReport report = streamed_run();
  report.engine = {};
  const std::string text = format_report(report, false);
  EXPECT_EQ(text.find("experts"), std::string::npos) << text;
  EXPECT_NE(text.find("peak"), std::string::npos) << text;
}

}  // namespace
}  // namespace sluice
