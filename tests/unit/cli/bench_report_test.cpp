#include "cli/bench_report.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace sluice {
namespace {

BenchRepetition repetition(double seconds, std::optional<double> cached) {
  BenchRepetition one;
  one.prefill.figures = {.tokens = 100,
                         .seconds = seconds,
                         .experts = {.requests = 10, .hits = 4, .misses = 6, .evictions = 2, .bytes_read = 1000},
                         .stall_s = seconds / 4};
  one.decode.figures = {.tokens = 10, .seconds = seconds * 2, .experts = {.requests = 8, .hits = 8}};
  one.cached_share = cached;
  one.peak_rss_bytes = 1 << 20;
  return one;
}

BenchReport report_with(BenchState state, std::optional<double> cached) {
  BenchReport report;
  report.version = "1.2.3";
  report.commit = "commit abc";
  report.processor = "Some CPU";
  report.text = "text.txt";
  report.routing = {
      .choices = 5000, .hottest_quarter = 0.5, .hottest_quarter_even = 0.3, .verdict = RoutingVerdict::kUneven};
  BenchRun run = {.budget = "25%", .budget_bytes = 4 << 20, .prompt_tokens = 100, .gen_tokens = 10, .state = state};
  for (const double seconds : {4.0, 1.0, 2.0}) run.repetitions.push_back(repetition(seconds, cached));
  report.runs.push_back(std::move(run));
  return report;
}

TEST(BenchReport, SpreadHasTheMedianOfOddAndEvenCounts) {
  EXPECT_EQ(spread_of({3, 1, 2}).median, 2);
  EXPECT_EQ(spread_of({4, 1, 2, 3}).median, 2.5);
  EXPECT_EQ(spread_of({4, 1, 2, 3}).min, 1);
  EXPECT_EQ(spread_of({4, 1, 2, 3}).max, 4);
  EXPECT_EQ(spread_of({7}).median, 7);
}

TEST(BenchReport, TableAndJsonTellTheSame) {
  const BenchReport report = report_with(BenchState::kCold, 0.0);
  const std::string text = format_bench(report);
  EXPECT_NE(
      text.find(
          "| 25% (4.00 MiB) | 100 + 10 | cold | 50.0 (25.0 - 100.0) | 2.5 (1.2 - 5.0) | 40.0 / 100.0 | 10 B / 0 B |"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("energy not available"), std::string::npos) << text;
  EXPECT_EQ(text.find("NOTE"), std::string::npos) << text;

  const nlohmann::json json = bench_json(report);
  const nlohmann::json& run = json["runs"][0];
  EXPECT_EQ(run["state"], "cold");
  EXPECT_EQ(run["file_cold"], true);
  EXPECT_EQ(run["prefill"]["tokens_per_second"]["median"], 50.0);
  EXPECT_EQ(run["prefill"]["stalled_share"]["max"], 0.25);
  EXPECT_EQ(run["repetitions"].size(), 3u);
  EXPECT_EQ(run["repetitions"][0]["prefill"]["tokens"], 100);
  EXPECT_TRUE(run["repetitions"][0]["decode"]["joules"].is_null());
  EXPECT_EQ(json["machine"]["energy"], "not available");
  EXPECT_EQ(json["reservations"].size(), 0u);
}

TEST(BenchReport, AFileThatStayedCachedIsTold) {
  for (const std::optional<double> cached : {std::optional(0.4), std::optional<double>()}) {
    const BenchReport report = report_with(BenchState::kCold, cached);
    EXPECT_FALSE(report.runs[0].file_cold());
    EXPECT_NE(format_bench(report).find("| cold pool, file cached |"), std::string::npos);
    ASSERT_EQ(report.reservations().size(), 1u);
    EXPECT_NE(report.reservations()[0].find("could not be made cold"), std::string::npos);
  }
  EXPECT_TRUE(report_with(BenchState::kWarm, 0.4).reservations().empty());
}

TEST(BenchReport, RandomTokensAndUniformRoutingAreMarked) {
  BenchReport report = report_with(BenchState::kCold, 0.0);
  report.text_random = true;
  report.routing.verdict = RoutingVerdict::kUniform;
  const std::string text = format_bench(report);
  EXPECT_NE(text.find("NOTE: random tokens: routing is not representative"), std::string::npos) << text;
  EXPECT_NE(text.find("NOTE: uniform routing: not representative"), std::string::npos) << text;
  EXPECT_EQ(bench_json(report)["reservations"].size(), 2u);
}

TEST(BenchReport, EnergyIsPerDecodedToken) {
  BenchReport report = report_with(BenchState::kWarm, 0.0);
  report.energy_available = true;
  for (BenchRepetition& one : report.runs[0].repetitions) one.decode.joules = 25;
  const std::string text = format_bench(report);
  EXPECT_NE(text.find("2.50 J/token"), std::string::npos) << text;
  EXPECT_NE(text.find("energy by RAPL"), std::string::npos) << text;
}

}  // namespace
}  // namespace sluice
