#include "policy/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "unit/policy/policy_twins.h"

namespace sluice {
namespace {

RoutingTrace empty_trace(uint32_t n_layer, uint32_t n_expert, uint32_t top_k) {
  RoutingTrace trace;
  trace.header = {.n_layer = n_layer, .n_expert = n_expert, .top_k = top_k, .model = "", .record_bytes = {}};
  return trace;
}

void append(RoutingTrace& trace, uint32_t layer, const std::vector<uint16_t>& ids) {
  trace.records.push_back({layer, static_cast<uint32_t>(ids.size() / trace.header.top_k), trace.ids.size()});
  trace.ids.insert(trace.ids.end(), ids.begin(), ids.end());
}

RoutingTrace random_trace(uint64_t seed, uint32_t n_layer, uint32_t n_expert, uint32_t top_k, int n_forward,
                          uint32_t n_token_max) {
  std::mt19937_64 random(seed);
  RoutingTrace trace = empty_trace(n_layer, n_expert, top_k);
  for (int forward = 0; forward < n_forward; forward++) {
    const uint32_t n_token = static_cast<uint32_t>(random() % n_token_max) + 1;
    for (uint32_t layer = 0; layer < n_layer; layer++) {
      if (random() % 10 == 0) continue;
      std::vector<uint16_t> ids;
      for (uint32_t token = 0; token < n_token; token++) {
        std::vector<uint16_t> chosen;
        while (chosen.size() < top_k) {
          const auto id = static_cast<uint16_t>(std::min(random() % n_expert, random() % n_expert));
          if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) chosen.push_back(id);
        }
        ids.insert(ids.end(), chosen.begin(), chosen.end());
      }
      append(trace, layer, ids);
    }
  }
  return trace;
}

// The protocol of replay.h word for word, with maps instead of arrays and the slow twins instead of the policies.
ReplayResult replay_slowly(const RoutingTrace& trace, const ReplayOptions& options) {
  struct Pool {
    std::unique_ptr<EvictionPolicy> policy;
    std::map<uint32_t, ExpertId> content;
    uint32_t n_slot = 0;
  };
  std::vector<Pool> pools;
  for (const uint32_t n_slot : options.pools.n_slot) {
    PolicyOptions policy = options.policy;
    policy.n_slot = n_slot;
    pools.push_back({make_twin(policy), {}, n_slot});
  }
  ReplayResult result;
  result.layers.resize(trace.header.n_layer);
  std::vector<std::set<size_t>> forward_tokens;
  uint64_t forward = 0;
  int64_t last_layer = -1;
  for (const RoutingRecord& record : trace.records) {
    if (int64_t{record.layer} <= last_layer) {
      forward++;
      for (Pool& pool : pools) pool.policy->advance();
    }
    last_layer = record.layer;
    const bool counted = forward >= options.warm_forwards;
    ExpertCounters unused;
    const auto counters = [&](uint32_t layer) -> ExpertCounters& { return counted ? result.layers[layer] : unused; };

    std::vector<ExpertId> experts;
    for (const uint16_t id : trace.ids_of(record)) {
      const ExpertId expert{record.layer, id};
      if (std::find(experts.begin(), experts.end(), expert) == experts.end()) experts.push_back(expert);
    }
    Pool& pool = pools[options.pools.pool_of_layer[record.layer]];
    const auto slot_of = [&](ExpertId id) -> std::optional<uint32_t> {
      for (const auto& [slot, held] : pool.content) {
        if (held == id) return slot;
      }
      return std::nullopt;
    };
    const auto place = [&](ExpertId id) {
      std::optional<uint32_t> slot;
      if (pool.content.size() < pool.n_slot) {
        slot = static_cast<uint32_t>(pool.content.size());
      } else if ((slot = pool.policy->victim())) {
        pool.policy->acquire(*slot);
        counters(pool.content[*slot].layer).evictions++;
      } else {
        return false;
      }
      pool.content[*slot] = id;
      return true;
    };
    std::vector<ExpertId> hits;
    std::vector<ExpertId> placed;
    std::vector<ExpertId> unplaced;
    std::vector<ExpertId> misses;
    for (const ExpertId id : experts) pool.policy->on_access(id);
    for (const ExpertId id : experts) {
      if (const auto slot = slot_of(id)) {
        pool.policy->acquire(*slot);
        hits.push_back(id);
      } else {
        misses.push_back(id);
      }
    }
    for (const ExpertId id : misses) {
      if (unplaced.empty() && place(id)) {
        placed.push_back(id);
      } else {
        unplaced.push_back(id);
      }
    }
    counters(record.layer).requests += experts.size();
    counters(record.layer).hits += hits.size();
    counters(record.layer).misses += misses.size();
    counters(record.layer).loads += misses.size();
    counters(record.layer).unplaced += unplaced.size();
    std::vector<ExpertId> line = hits;
    line.insert(line.end(), placed.begin(), placed.end());
    line.insert(line.end(), unplaced.begin(), unplaced.end());
    std::set<ExpertId> released;
    for (size_t i = 0; i < unplaced.size(); i++) {
      pool.policy->release(slot_of(line[i]).value(), line[i]);
      released.insert(line[i]);
      EXPECT_TRUE(place(unplaced[i]));
    }
    for (const ExpertId id : experts) {
      if (!released.contains(id)) pool.policy->release(slot_of(id).value(), id);
    }
    if (!counted) continue;
    result.calls++;
    if (!misses.empty()) result.calls_with_miss++;
    forward_tokens.resize(forward + 1);
    forward_tokens[forward].insert(record.n_token);
  }
  for (const std::set<size_t>& n_token : forward_tokens) {
    if (n_token.empty()) continue;
    result.forwards++;
    result.tokens += *n_token.rbegin();
  }
  for (ExpertCounters& counters : result.layers) result.total += counters;
  return result;
}

void expect_equal(const ExpertCounters& a, const ExpertCounters& b) {
  EXPECT_EQ(a.requests, b.requests);
  EXPECT_EQ(a.hits, b.hits);
  EXPECT_EQ(a.misses, b.misses);
  EXPECT_EQ(a.loads, b.loads);
  EXPECT_EQ(a.evictions, b.evictions);
  EXPECT_EQ(a.unplaced, b.unplaced);
}

TEST(Replay, AgreesWithItsProtocolPlayedSlowly) {
  uint64_t n_unplaced = 0;
  for (const PolicyKind kind : kPolicyKinds) {
    for (uint64_t seed = 0; seed < 24; seed++) {
      const RoutingTrace trace = random_trace(seed, 3, 12, 3, 120, seed % 2 == 0 ? 1 : 6);
      const auto n_slot = static_cast<uint32_t>(3 + seed % 20);
      for (const ReplayPools& pools : {one_pool(trace, n_slot), pool_per_layer(trace, n_slot)}) {
        ReplayOptions options{.pools = pools, .policy = {.kind = kind, .decay_interval = 9, .half_life = 6}};
        options.warm_forwards = seed % 3 * 10;
        const auto fast = replay(trace, options);
        ASSERT_TRUE(fast.ok());
        const ReplayResult slow = replay_slowly(trace, options);
        expect_equal(fast->total, slow.total);
        for (uint32_t layer = 0; layer < 3; layer++) expect_equal(fast->layers[layer], slow.layers[layer]);
        EXPECT_EQ(fast->forwards, slow.forwards);
        EXPECT_EQ(fast->tokens, slow.tokens);
        EXPECT_EQ(fast->calls, slow.calls);
        EXPECT_EQ(fast->calls_with_miss, slow.calls_with_miss);
        n_unplaced += slow.total.unplaced;
        if (HasFailure()) FAIL() << policy_name(kind) << ", seed " << seed;
      }
    }
  }
  EXPECT_GT(n_unplaced, 1000U);
}

TEST(Replay, CountsAsByHand) {
  RoutingTrace trace = empty_trace(2, 8, 2);
  trace.header.record_bytes = {0, 100};
  append(trace, 1, {0, 1});        // both miss
  append(trace, 1, {1, 2});        // 1 hits, 2 takes the slot of 0
  append(trace, 1, {2, 1, 1, 3});  // two tokens: both hit, 3 finds no slot: it gets that of 2, the first of the line
  append(trace, 1, {3, 1});        // both hit
  const auto result = replay(trace, {.pools = one_pool(trace, 2), .policy = {}});
  ASSERT_TRUE(result.ok());
  const ExpertCounters& counters = result->layers[1];
  EXPECT_EQ(counters.requests, 9U);
  EXPECT_EQ(counters.hits, 5U);
  EXPECT_EQ(counters.misses, 4U);
  EXPECT_EQ(counters.evictions, 2U);
  EXPECT_EQ(counters.unplaced, 1U);
  EXPECT_EQ(counters.bytes_read, 400U);
  EXPECT_EQ(result->layers[0].requests, 0U);
  EXPECT_EQ(result->forwards, 4U);
  EXPECT_EQ(result->tokens, 5U);
  EXPECT_EQ(result->calls, 4U);
  EXPECT_EQ(result->calls_with_miss, 3U);
}

TEST(Replay, CountsAnEvictionForTheLayerThatLost) {
  RoutingTrace trace = empty_trace(2, 8, 1);
  append(trace, 0, {3});
  append(trace, 1, {3});
  const auto result = replay(trace, {.pools = one_pool(trace, 1), .policy = {}});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->layers[0].evictions, 1U);
  EXPECT_EQ(result->layers[1].evictions, 0U);
}

TEST(Replay, OneAdvancePerForwardButTheFirst) {
  // LFU with an interval of one forward: counts are halved at each new forward. Expert 0 was used twice before (2 ->
  // 1), 1 once (1 -> 0): 1 goes. Had the first forward begun with an advance as well, nothing would change; had every
  // record advanced, both would be 0 and 0 would go.
  RoutingTrace trace = empty_trace(3, 8, 1);
  append(trace, 1, {0});
  append(trace, 2, {1});
  append(trace, 1, {0});
  append(trace, 2, {2});
  append(trace, 2, {1});
  ReplayOptions options{.pools = one_pool(trace, 2), .policy = {.kind = PolicyKind::kLfu, .decay_interval = 1}};
  const auto result = replay(trace, options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->forwards, 3U);
  EXPECT_EQ(result->layers[2].hits, 0U);
  EXPECT_EQ(result->layers[1].hits, 1U);
}

TEST(ReplayPoolsTest, SplitSlots) {
  RoutingTrace trace = empty_trace(5, 8, 1);
  trace.header.record_bytes = {0, 10, 20, 10, 10};
  for (const uint32_t layer : {1U, 2U, 3U, 4U}) append(trace, layer, {0});
  EXPECT_EQ(routed_layers(trace), (std::vector<uint32_t>{1, 2, 3, 4}));
  const ReplayPools one = one_pool(trace, 9);
  EXPECT_EQ(one.pool_of_layer, (std::vector<uint32_t>{kNoPool, 0, 0, 0, 0}));
  EXPECT_EQ(one.n_slot, std::vector<uint32_t>{9});
  const ReplayPools each = pool_per_layer(trace, 10);
  EXPECT_EQ(each.pool_of_layer, (std::vector<uint32_t>{kNoPool, 0, 1, 2, 3}));
  EXPECT_EQ(each.n_slot, (std::vector<uint32_t>{3, 3, 2, 2}));
  const ReplayPools sizes = pool_per_record_size(trace, 10);
  EXPECT_EQ(sizes.pool_of_layer, (std::vector<uint32_t>{kNoPool, 0, 1, 0, 0}));
  EXPECT_EQ(sizes.n_slot, (std::vector<uint32_t>{7, 2}));
  trace.header.record_bytes.clear();
  EXPECT_EQ(pool_per_record_size(trace, 10).n_slot, std::vector<uint32_t>{10});
}

TEST(Replay, RefusesPoolsThatDoNotFit) {
  RoutingTrace trace = empty_trace(2, 8, 1);
  append(trace, 0, {0});
  append(trace, 1, {0});
  const auto error_of = [&](const ReplayPools& pools) {
    const auto result = replay(trace, {.pools = pools, .policy = {}});
    const auto bound = replay_bound(trace, {.pools = pools, .policy = {}});
    EXPECT_FALSE(result.ok() || bound.ok());
    return result.ok() ? std::string() : result.error().message();
  };
  EXPECT_EQ(error_of({{0}, {1}}), "replay: wanted the pools of 2 layers, given 1");
  EXPECT_EQ(error_of({{0, 1}, {1}}), "replay: layer 1 has no pool");
  EXPECT_EQ(error_of(pool_per_layer(trace, 1)), "replay: wanted at least 1 slot in each of 2 pools, pool 1 has none");
}

// The fewest misses by trying everything: all sets that may stay in the pool after each call.
uint64_t fewest_misses(const RoutingTrace& trace, uint32_t n_slot) {
  const uint32_t n_bit = trace.header.n_layer * trace.header.n_expert;
  std::map<uint32_t, uint64_t> states{{0, 0}};  // resident experts as bits -> fewest misses so far
  for (const RoutingRecord& record : trace.records) {
    uint32_t wanted = 0;
    for (const uint16_t id : trace.ids_of(record)) wanted |= 1U << (record.layer * trace.header.n_expert + id);
    const bool fits = std::popcount(wanted) <= static_cast<int>(n_slot);
    std::map<uint32_t, uint64_t> next;
    for (const auto& [resident, misses] : states) {
      const uint64_t after = misses + static_cast<uint64_t>(std::popcount(wanted & ~resident));
      for (uint32_t kept = 0; kept < 1U << n_bit; kept++) {
        if (std::popcount(kept) > static_cast<int>(n_slot)) continue;
        if (fits ? (kept & wanted) != wanted || (kept & ~(resident | wanted)) != 0 : (kept & ~wanted) != 0) continue;
        const auto [it, is_new] = next.try_emplace(kept, after);
        if (!is_new) it->second = std::min(it->second, after);
      }
    }
    states = std::move(next);
  }
  uint64_t fewest = UINT64_MAX;
  for (const auto& [resident, misses] : states) fewest = std::min(fewest, misses);
  return fewest;
}

TEST(ReplayBound, IsTheFewestMissesThereCanBe) {
  for (uint64_t seed = 0; seed < 150; seed++) {
    const uint32_t n_layer = seed % 2 == 0 ? 1 : 2;
    const RoutingTrace trace = random_trace(seed, n_layer, n_layer == 1 ? 6 : 3, 1 + seed % 2, 10, 3);
    for (uint32_t n_slot = 1; n_slot <= 5; n_slot++) {
      const auto bound = replay_bound(trace, {.pools = one_pool(trace, n_slot), .policy = {}});
      ASSERT_TRUE(bound.ok());
      ASSERT_EQ(bound->total.misses, fewest_misses(trace, n_slot)) << "seed " << seed << ", " << n_slot << " slots";
    }
  }
}

TEST(ReplayBound, IsBeatenByNoPolicy) {
  for (uint64_t seed = 0; seed < 40; seed++) {
    const RoutingTrace trace = random_trace(seed, 4, 24, 4, 200, seed % 4 == 0 ? 8 : 1);
    const auto n_slot = static_cast<uint32_t>(4 + seed * 2);
    for (const ReplayPools& pools : {one_pool(trace, n_slot), pool_per_layer(trace, n_slot)}) {
      ReplayOptions options{.pools = pools, .policy = {}};
      options.warm_forwards = seed % 2 * 20;
      const auto bound = replay_bound(trace, options);
      ASSERT_TRUE(bound.ok());
      for (const PolicyKind kind : kPolicyKinds) {
        options.policy.kind = kind;
        const auto result = replay(trace, options);
        ASSERT_TRUE(result.ok());
        EXPECT_EQ(result->total.requests, bound->total.requests);
        EXPECT_EQ(result->tokens, bound->tokens);
        EXPECT_GE(result->total.misses, bound->total.misses) << policy_name(kind) << ", seed " << seed;
        EXPECT_EQ(result->total.loads, result->total.misses);
      }
      if (options.warm_forwards == 0) {
        uint64_t n_slot_all = 0;
        for (const uint32_t slots : pools.n_slot) n_slot_all += slots;
        EXPECT_LE(bound->total.loads - bound->total.evictions, n_slot_all);
      }
    }
  }
}

TEST(ReplayBound, WithEverySlotHasOnlyFirstMisses) {
  const RoutingTrace trace = random_trace(1, 3, 16, 4, 100, 2);
  std::set<ExpertId> seen;
  for (const RoutingRecord& record : trace.records) {
    for (const uint16_t id : trace.ids_of(record)) seen.insert({record.layer, id});
  }
  const ReplayOptions options{.pools = one_pool(trace, 48), .policy = {}};
  EXPECT_EQ(replay_bound(trace, options)->total.misses, seen.size());
  EXPECT_EQ(replay(trace, options)->total.misses, seen.size());
  EXPECT_EQ(replay(trace, options)->total.evictions, 0U);
}

}  // namespace
}  // namespace sluice
