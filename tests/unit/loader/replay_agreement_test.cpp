// The promise of policy/replay.h: a run's own trace predicts its counters, whatever order the drive answers in.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "loader/loader.h"
#include "policy/replay.h"
#include "unit/loader/loader_fixture.h"

namespace sluice {
namespace {

constexpr uint32_t kExperts = 16;
constexpr uint32_t kTopK = 3;

// Batches of 1 to 6 tokens over the model's layers, low expert numbers more likely.
RoutingTrace made_up_trace(const TestModel& model, int n_forward) {
  std::mt19937 random(7);
  RoutingTrace trace;
  trace.header = {
      .n_layer = model.sources.back().layer + 1, .n_expert = kExperts, .top_k = kTopK, .model = "", .record_bytes = {}};
  trace.header.record_bytes.resize(trace.header.n_layer, 0);
  for (const LayerSource& source : model.sources) trace.header.record_bytes[source.layer] = source.record_bytes();
  for (int forward = 0; forward < n_forward; ++forward) {
    const uint32_t n_token = forward % 4 == 0 ? static_cast<uint32_t>(random() % 6 + 1) : 1;
    for (const LayerSource& source : model.sources) {
      trace.records.push_back({source.layer, n_token, trace.ids.size()});
      for (uint32_t i = 0; i < n_token * kTopK; ++i) {
        trace.ids.push_back(static_cast<uint16_t>(std::min(random() % kExperts, random() % kExperts)));
      }
    }
  }
  return trace;
}

// By policy and first layer with experts: a model may begin with a dense layer or not.
class ReplayAgreement : public testing::TestWithParam<std::tuple<PolicyKind, uint32_t, bool>> {};

INSTANTIATE_TEST_SUITE_P(Policies, ReplayAgreement, testing::Combine(testing::ValuesIn(kPolicyKinds), testing::Values(0u, 1u), testing::Bool()),
                         [](const auto& test) {
                           return policy_name(std::get<0>(test.param)) + std::string("_from_layer_") + std::to_string(std::get<1>(test.param)) +
                                  (std::get<2>(test.param) ? "_per_layer" : "");
                         });

TEST_P(ReplayAgreement, PredictsTheLoadersCounters) {
  const auto [policy, first_layer, per_layer] = GetParam();
  const auto model = make_test_model({4096, 1200, 4096}, kExperts, DirectMode::kOff, first_layer);
  const RoutingTrace trace = made_up_trace(*model, 600);
  const SlotPlan layout = plan_layout(model->sources, kTopK, per_layer);
  for (const double share : {0.0, 0.1, 0.5}) {
    const auto budget =
        layout.bytes_min + static_cast<uint64_t>(share * static_cast<double>(layout.bytes_all - layout.bytes_min));
    auto device = open_device({});
    ASSERT_TRUE(device.ok()) << device.error().message();
    auto loader = Loader::create(model->sources, std::move(*device),
                                 {.budget_bytes = budget, .top_k = kTopK, .policy = policy, .per_layer = per_layer});
    ASSERT_TRUE(loader.ok()) << loader.error().message();
    for (const RoutingRecord& record : trace.records) {
      std::vector<uint32_t> experts;
      for (const uint16_t id : trace.ids_of(record)) {
        if (std::find(experts.begin(), experts.end(), id) == experts.end()) experts.push_back(id);
      }
      ASSERT_TRUE((*loader)->start(record.layer, experts).ok());
      while (true) {
        const auto ready = (*loader)->next();
        ASSERT_TRUE(ready.ok()) << ready.error().message();
        if (ready->empty()) break;
      }
      (*loader)->end();
    }
    EngineStats stats;
    (*loader)->add_stats(stats);

    ReplayOptions options{.pools = {std::vector<uint32_t>(trace.header.n_layer, kNoPool), {}}, .policy = {}};
    options.policy.kind = (*loader)->policy();
    const SlotPlan& plan = (*loader)->plan();
    for (size_t i = 0; i < model->sources.size(); ++i) {
      options.pools.pool_of_layer[model->sources[i].layer] = plan.layouts[i].size_class;
    }
    for (const ClassPlan& size_class : plan.classes) options.pools.n_slot.push_back(size_class.n_slot);
    const auto predicted = replay(trace, options);
    ASSERT_TRUE(predicted.ok()) << predicted.error().message();
    ASSERT_EQ(stats.layers.size(), predicted->layers.size());
    for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
      const ExpertCounters& ran = stats.layers[layer];
      const ExpertCounters& replayed = predicted->layers[layer];
      EXPECT_EQ(ran.requests, replayed.requests) << layer;
      EXPECT_EQ(ran.hits, replayed.hits) << layer;
      EXPECT_EQ(ran.misses, replayed.misses) << layer;
      EXPECT_EQ(ran.loads, replayed.loads) << layer;
      EXPECT_EQ(ran.evictions, replayed.evictions) << layer;
      EXPECT_EQ(ran.unplaced, replayed.unplaced) << layer;
      EXPECT_EQ(ran.bytes_read, replayed.bytes_read) << layer;
    }
    EXPECT_TRUE(share > 0 || predicted->total.unplaced > 0);
  }
}

}  // namespace
}  // namespace sluice
