#include "cli/replay_report.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

// Two layers of four experts, of which a token takes two; five tokens.
RoutingTrace small_trace() {
  RoutingTrace trace;
  trace.header = {.n_layer = 3, .n_expert = 4, .top_k = 2, .model = "tiny", .record_bytes = {0, 1 << 20, 1 << 20}};
  const std::vector<uint16_t> layer_1 = {0, 1, 0, 1, 0, 2, 0, 1, 0, 3};
  const std::vector<uint16_t> layer_2 = {3, 2, 2, 1, 1, 0, 3, 2, 2, 1};
  for (uint64_t token = 0; token < 5; token++) {
    for (const auto& [layer, ids] : {std::pair(1U, layer_1), std::pair(2U, layer_2)}) {
      trace.records.push_back({layer, 1, trace.ids.size()});
      trace.ids.push_back(ids[token * 2]);
      trace.ids.push_back(ids[token * 2 + 1]);
    }
  }
  return trace;
}

ReplaySettings small_settings() {
  ReplaySettings settings;
  settings.slots = {4};
  settings.policies = {PolicyKind::kLru};
  return settings;
}

TEST(ReplayReport, ShowsWhatWasReplayed) {
  ReplaySettings settings = small_settings();
  settings.per_layer = true;  // two slots for each layer: by hand, layer 1 hits 5 of 10, layer 2 3 of 10
  settings.cost = {.read_gbps = 1, .read_latency_us = 100, .compute_ms = 10};
  const auto report = make_replay_report(small_trace(), settings);
  ASSERT_TRUE(report.ok()) << report.error().message();
  EXPECT_EQ(format_replay_report(*report, true),
            "trace   tiny: 5 tokens in 5 forwards, 2 layers of 4 experts, top 2, 8.00 MiB in all\n"
            "pool    one for each layer, empty at the start\n"
            "\n"
            "  slots    share  policy   hit rate  misses/token   read/token  tokens/s\n"
            "      4   50.0 %  lru        40.0 %          2.40     2.40 MiB     78.76\n"
            "      4   50.0 %  belady     40.0 %          2.40     2.40 MiB     78.76\n"
            "\n"
            "belady knows the future: no policy has fewer misses.\n"
            "tokens/s = 1 / (10 ms compute + read per token / 1 GB/s + layer calls with a miss per token x 100 us), "
            "nothing overlapped.\n"
            "\n"
            "hit rate by layer\n"
            "  slots  policy       1      2\n"
            "      4  lru       50.0   30.0\n"
            "      4  belady    50.0   30.0\n");
}

TEST(ReplayReport, LeavesOutWhatIsNotKnown) {
  RoutingTrace trace = small_trace();
  trace.header.record_bytes.clear();
  trace.header.model.clear();
  ReplaySettings settings = small_settings();
  settings.warm_forwards = 1;
  settings.cost.read_gbps = 1;
  const auto report = make_replay_report(trace, settings);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(format_replay_report(*report, false),
            "trace   4 tokens in 4 forwards, 2 layers of 4 experts, top 2\n"
            "pool    shared by all layers, filled by 1 forward before\n"
            "\n"
            "  slots    share  policy   hit rate  misses/token\n"
            "      4   50.0 %  lru        50.0 %          2.00\n"
            "      4   50.0 %  belady     62.5 %          1.50\n"
            "\n"
            "belady knows the future: no policy has fewer misses.\n");
  const nlohmann::json json = replay_report_json(*report);
  EXPECT_TRUE(json["trace"]["expert_bytes"].is_null());
  EXPECT_TRUE(json["runs"][0]["bytes_read"].is_null());
  EXPECT_TRUE(json["runs"][0]["tokens_per_second"].is_null());
}

TEST(ReplayReport, GivesTheSameFiguresAsJson) {
  ReplaySettings settings = small_settings();
  settings.slots = {8, 4};
  settings.policies = {PolicyKind::kLfu, PolicyKind::kS3Fifo};
  const auto report = make_replay_report(small_trace(), settings);
  ASSERT_TRUE(report.ok());
  const nlohmann::json json = replay_report_json(*report);
  EXPECT_EQ(json["trace"]["layers"], 2);
  EXPECT_EQ(json["trace"]["expert_bytes"], 8 << 20);
  EXPECT_EQ(json["pools"], "shared");
  ASSERT_EQ(json["runs"].size(), 6U);
  const char* const policies[] = {"lfu", "s3fifo", "belady"};
  for (size_t i = 0; i < 6; i++) {
    const nlohmann::json& run = json["runs"][i];
    const ExpertCounters& total = report->runs[i].result.total;
    EXPECT_EQ(run["slots"], i < 3 ? 4 : 8);  // by size, whatever order they were asked for
    EXPECT_EQ(run["policy"], policies[i % 3]);
    EXPECT_EQ(run["requests"], 20);
    EXPECT_EQ(run["hits"], total.hits);
    EXPECT_EQ(run["misses"], 20 - total.hits);
    EXPECT_EQ(run["bytes_read"], total.misses << 20);
    EXPECT_DOUBLE_EQ(run["misses_per_token"], static_cast<double>(total.misses) / 5);
    ASSERT_EQ(run["layers"].size(), 2U);
    EXPECT_EQ(run["layers"][0]["layer"], 1);
    EXPECT_EQ(run["layers"][0]["hits"].get<uint64_t>() + run["layers"][1]["hits"].get<uint64_t>(), total.hits);
  }
  EXPECT_EQ(json["runs"][3]["misses"], 8);  // with every slot only first uses miss
}

TEST(ReplayReport, TurnsBudgetsIntoSlots) {
  const RoutingTrace trace = small_trace();
  const auto slots_of = [&](const std::string& budget, uint64_t record_bytes) -> uint32_t {
    ReplaySettings settings = small_settings();
    settings.slots.clear();
    settings.budgets = {*parse_budget(budget)};
    settings.record_bytes = record_bytes;
    const auto report = make_replay_report(trace, settings);
    EXPECT_TRUE(report.ok()) << budget;
    return report.ok() ? report->runs.front().n_slot : 0;
  };
  EXPECT_EQ(slots_of("50%", 0), 4U);
  EXPECT_EQ(slots_of("49.9%", 0), 3U);
  EXPECT_EQ(slots_of("100%", 0), 8U);
  EXPECT_EQ(slots_of("3MiB", 0), 3U);
  EXPECT_EQ(slots_of("1GiB", 0), 8U);
  EXPECT_EQ(slots_of("1000", 300), 3U);
}

TEST(ReplayReport, RefusesWhatDoesNotFit) {
  RoutingTrace trace = small_trace();
  const auto error_of = [&](const ReplaySettings& settings) {
    const auto report = make_replay_report(trace, settings);
    EXPECT_FALSE(report.ok());
    return report.ok() ? std::string() : report.error().message();
  };
  ReplaySettings settings = small_settings();
  settings.slots = {9};
  EXPECT_EQ(error_of(settings), "slots: wanted 1 to 8 (all experts of the trace), given 9");
  settings = small_settings();
  settings.slots = {1};
  settings.per_layer = true;
  EXPECT_EQ(error_of(settings), "replay: wanted at least 1 slot in each of 2 pools, pool 1 has none");
  settings = small_settings();
  settings.budgets = {*parse_budget("1%")};
  EXPECT_EQ(error_of(settings), "budget: less than one of 8 experts");
  settings.budgets = {*parse_budget("auto")};
  EXPECT_EQ(error_of(settings), "budget: wanted a size or a share, given auto");
  settings = small_settings();
  settings.warm_forwards = 5;
  EXPECT_EQ(error_of(settings), "warm: the trace has no more than 5 forwards");
  settings = small_settings();
  settings.record_bytes = UINT64_MAX / 2;
  EXPECT_EQ(error_of(settings), "layer 1: experts of 9223372036854775807 bytes");
  trace.header.record_bytes.clear();
  settings = small_settings();
  settings.budgets = {*parse_budget("2MiB")};
  EXPECT_EQ(error_of(settings),
            "budget: 2.00 MiB is a size, but the trace does not say how large an expert is (--record-bytes)");
  trace.records.clear();
  EXPECT_EQ(error_of(small_settings()), "the trace has no records");
}

TEST(ReplaySpeed, FollowsTheFormula) {
  ReplayResult result;
  result.tokens = 10;
  result.calls_with_miss = 20;
  result.total.loads = 50;
  result.total.bytes_read = 5'000'000;
  // 2 ms + 0.5 MB at 0.25 GB/s + 2 x 500 us = 5 ms
  const CostModel cost{.read_gbps = 0.25, .read_latency_us = 500, .compute_ms = 2};
  EXPECT_NEAR(predict_tokens_per_second(result, cost).value(), 200, 1e-9);
  EXPECT_FALSE(predict_tokens_per_second(result, {.compute_ms = 2}).has_value());
  result.total.bytes_read = 0;  // loads of unknown size
  EXPECT_FALSE(predict_tokens_per_second(result, cost).has_value());
}

TEST(ReplayFlags, AreParsed) {
  const auto shape = parse_raw_shape("8,6,128");
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape->n_layer, 8U);
  EXPECT_EQ(shape->top_k, 6U);
  EXPECT_EQ(shape->n_expert, 128U);
  for (const char* text : {"", "8,8", "8,8,128,1", "8,x,128", "8,8,128 ", "-8,8,128", "8,8,99999999999"}) {
    EXPECT_EQ(parse_raw_shape(text).error().text,
              fmt::format("raw: wanted LAYERS,TOP_K,EXPERTS such as 8,8,128, given '{}'", text));
  }
  EXPECT_EQ(parse_raw_shape("8,129,128").error().text, "top_k: wanted 1 to 128, given 129");

  EXPECT_EQ(parse_policies("all")->size(), std::size(kPolicyKinds));
  EXPECT_EQ(*parse_policies("lfru,lru,lfru"), (std::vector<PolicyKind>{PolicyKind::kLfru, PolicyKind::kLru}));
  EXPECT_FALSE(parse_policies("lru,").ok());
  EXPECT_FALSE(parse_policies("belady").ok());

  EXPECT_EQ(*parse_slot_counts("4,16"), (std::vector<uint32_t>{4, 16}));
  for (const char* text : {"", "4,", "4;5", "-1", "4294967296"}) {
    EXPECT_EQ(parse_slot_counts(text).error().text,
              fmt::format("slots: wanted numbers with commas between them, given '{}'", text));
  }

  const auto budgets = parse_budgets("25%,2GiB");
  ASSERT_TRUE(budgets.ok());
  ASSERT_EQ(budgets->size(), 2U);
  EXPECT_EQ((*budgets)[0].percent, 25);
  EXPECT_EQ((*budgets)[1].bytes, 2 * kGiB);
  EXPECT_FALSE(parse_budgets("25%,").ok());
}

}  // namespace
}  // namespace sluice
