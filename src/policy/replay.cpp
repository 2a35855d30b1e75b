#include "policy/replay.h"

#include <algorithm>
#include <map>
#include <queue>
#include <span>

#include "base/assert.h"

namespace sluice {

namespace {

constexpr uint32_t kNoSlot = UINT32_MAX;
constexpr uint64_t kNever = UINT64_MAX;

std::vector<bool> layer_has_records(const RoutingTrace& trace) {
  std::vector<bool> has(trace.header.n_layer, false);
  for (const RoutingRecord& record : trace.records) has[record.layer] = true;
  return has;
}

uint64_t record_bytes(const RoutingTrace& trace, uint32_t layer) {
  return trace.header.record_bytes.empty() ? 0 : trace.header.record_bytes[layer];
}

Status check_options(const RoutingTrace& trace, const ReplayOptions& options) {
  const ReplayPools& pools = options.pools;
  if (pools.pool_of_layer.size() != trace.header.n_layer) {
    return make_error(ErrorCode::kBadArgument, "replay: wanted the pools of {} layers, given {}", trace.header.n_layer,
                      pools.pool_of_layer.size());
  }
  for (const uint32_t layer : routed_layers(trace)) {
    if (pools.pool_of_layer[layer] >= pools.n_slot.size()) {
      return make_error(ErrorCode::kBadArgument, "replay: layer {} has no pool", layer);
    }
  }
  const auto empty = std::find(pools.n_slot.begin(), pools.n_slot.end(), 0U);
  if (empty != pools.n_slot.end()) {
    return make_error(ErrorCode::kBadArgument, "replay: wanted at least 1 slot in each of {} pools, pool {} has none",
                      pools.n_slot.size(), empty - pools.n_slot.begin());
  }
  return {};
}

// Lists a record's distinct experts in order of first appearance.
class DistinctExperts {
 public:
  explicit DistinctExperts(const RoutingTrace& trace) : trace_(trace), seen_in_(trace.header.n_expert, 0) {}

  // Valid until the next call.
  std::span<const uint32_t> of(const RoutingRecord& record) {
    list_.clear();
    n_call_++;
    for (const uint16_t id : trace_.ids_of(record)) {
      if (seen_in_[id] == n_call_) continue;
      seen_in_[id] = n_call_;
      list_.push_back(id);
    }
    return list_;
  }

 private:
  const RoutingTrace& trace_;
  std::vector<uint64_t> seen_in_;  // [n_expert] number of the last call that listed it
  uint64_t n_call_ = 0;
  std::vector<uint32_t> list_;
};

// Calls visit(record index, forward's number, whether it starts a forward) for all records.
template <typename Visit>
void for_each_call(const RoutingTrace& trace, Visit visit) {
  uint64_t forward = 0;
  for (size_t i = 0; i < trace.records.size(); i++) {
    const bool starts = trace.starts_forward(i);
    if (starts && i > 0) forward++;
    visit(i, forward, starts);
  }
}

// Fills in what does not depend on the policy: forwards and tokens after the warm ones, and the sums.
void finish(const RoutingTrace& trace, uint64_t warm_forwards, ReplayResult& result) {
  uint64_t forward_tokens = 0;
  for_each_call(trace, [&](size_t i, uint64_t forward, bool starts) {
    if (forward < warm_forwards) return;
    if (starts) {
      result.forwards++;
      result.tokens += forward_tokens;
      forward_tokens = 0;
    }
    forward_tokens = std::max<uint64_t>(forward_tokens, trace.records[i].n_token);
  });
  result.tokens += forward_tokens;
  for (uint32_t layer = 0; layer < result.layers.size(); layer++) {
    ExpertCounters& counters = result.layers[layer];
    counters.misses = counters.loads;
    counters.requests = counters.hits + counters.misses;
    counters.bytes_read = counters.loads * record_bytes(trace, layer);
    result.total += counters;
  }
}

// One pool under a policy: the protocol of replay.h, steps 3 to 6.
class PolicyPool {
 public:
  PolicyPool(const PolicyOptions& options)
      : policy_(make_policy(options)),
        n_expert_(options.n_expert),
        expert_in_(options.n_slot),
        slot_of_(size_t{options.n_layer} * options.n_expert, kNoSlot) {}

  void advance() { policy_->advance(); }

  // Counts into layers[...]; returns whether anything was missing.
  bool call(uint32_t layer, std::span<const uint32_t> experts, std::vector<ExpertCounters>& layers) {
    line_.clear();
    misses_.clear();
    for (const uint32_t expert : experts) {
      const ExpertId id{layer, expert};
      policy_->on_access(id);
      if (slot_of(id) == kNoSlot) {
        misses_.push_back(id);
      } else {
        policy_->acquire(slot_of(id));
        line_.push_back(id);
      }
    }
    layers[layer].hits += line_.size();
    layers[layer].loads += misses_.size();
    size_t n_placed = 0;
    while (n_placed < misses_.size() && place(misses_[n_placed], layers)) n_placed++;
    layers[layer].unplaced += misses_.size() - n_placed;
    line_.insert(line_.end(), misses_.begin(), misses_.end());
    const size_t n_unplaced = misses_.size() - n_placed;
    for (size_t i = 0; i < n_unplaced; i++) {
      policy_->release(slot_of(line_[i]), line_[i]);
      const bool placed = place(misses_[n_placed + i], layers);
      SLUICE_ASSERT(placed, "a slot was just released");
    }
    // Those of the line's front are no longer resident: their slots were taken.
    for (const uint32_t expert : experts) {
      const uint32_t slot = slot_of({layer, expert});
      if (slot != kNoSlot) policy_->release(slot, {layer, expert});
    }
    return !misses_.empty();
  }

 private:
  uint32_t& slot_of(ExpertId id) { return slot_of_[size_t{id.layer} * n_expert_ + id.expert]; }

  // Gives `id` a slot; false when there is none.
  bool place(ExpertId id, std::vector<ExpertCounters>& layers) {
    uint32_t slot = n_filled_;
    if (n_filled_ < expert_in_.size()) {
      n_filled_++;
    } else {
      const auto victim = policy_->victim();
      if (!victim) return false;
      slot = *victim;
      policy_->acquire(slot);
      layers[expert_in_[slot].layer].evictions++;
      slot_of(expert_in_[slot]) = kNoSlot;
    }
    expert_in_[slot] = id;
    slot_of(id) = slot;
    return true;
  }

  std::unique_ptr<EvictionPolicy> policy_;
  uint32_t n_expert_;
  std::vector<ExpertId> expert_in_;  // [n_slot]
  std::vector<uint32_t> slot_of_;    // [n_layer * n_expert]
  uint32_t n_filled_ = 0;            // slots that are not empty: the first ones, for slots never become empty again
  std::vector<ExpertId> line_;
  std::vector<ExpertId> misses_;
};

// One pool that knows when every expert is asked for next.
class ForesightPool {
 public:
  explicit ForesightPool(uint32_t n_slot, size_t n_experts) : n_slot_(n_slot), next_use_(n_experts, kNotResident) {}

  // `experts` are indexes of (layer, expert) with the number of the call that asks for them next, or kNever.
  struct Request {
    size_t expert = 0;
    uint64_t next_use = kNever;
  };
  bool call(uint32_t layer, uint32_t n_expert, std::vector<Request>& requests, std::vector<ExpertCounters>& layers) {
    uint64_t n_miss = 0;
    for (const Request& request : requests) {
      if (next_use_[request.expert] == kNotResident) {
        n_miss++;
      } else {
        // Out of the way of the evictions below: it is pinned.
        next_use_[request.expert] = kNotResident;
        n_resident_--;
      }
    }
    layers[layer].hits += requests.size() - n_miss;
    layers[layer].loads += n_miss;
    const auto evict_one = [&](uint64_t evicted_layer) { layers[evicted_layer].evictions++; };
    while (n_resident_ > 0 && n_resident_ + requests.size() > n_slot_) {
      const auto [use, expert] = farthest_.top();
      farthest_.pop();
      if (next_use_[expert] != use) continue;  // an entry of an earlier residence
      next_use_[expert] = kNotResident;
      n_resident_--;
      evict_one(expert / n_expert);
    }
    size_t n_kept = requests.size();
    if (n_kept > n_slot_) {
      n_kept = n_slot_;
      std::nth_element(requests.begin(), requests.begin() + static_cast<ptrdiff_t>(n_kept), requests.end(),
                       [](const Request& a, const Request& b) { return a.next_use < b.next_use; });
      for (size_t i = n_kept; i < requests.size(); i++) evict_one(layer);
    }
    for (size_t i = 0; i < n_kept; i++) {
      next_use_[requests[i].expert] = requests[i].next_use;
      farthest_.emplace(requests[i].next_use, requests[i].expert);
      n_resident_++;
    }
    return n_miss > 0;
  }

 private:
  static constexpr uint64_t kNotResident = kNever - 1;

  const uint64_t n_slot_;
  uint64_t n_resident_ = 0;
  std::vector<uint64_t> next_use_;                             // [n_layer * n_expert], or kNotResident
  std::priority_queue<std::pair<uint64_t, size_t>> farthest_;  // by next use; may hold entries that are out of date
};

}  // namespace

std::vector<uint32_t> routed_layers(const RoutingTrace& trace) {
  const std::vector<bool> has = layer_has_records(trace);
  std::vector<uint32_t> layers;
  for (uint32_t layer = 0; layer < has.size(); layer++) {
    if (has[layer]) layers.push_back(layer);
  }
  return layers;
}

ReplayPools one_pool(const RoutingTrace& trace, uint32_t n_slot) {
  ReplayPools pools{std::vector<uint32_t>(trace.header.n_layer, kNoPool), {n_slot}};
  for (const uint32_t layer : routed_layers(trace)) pools.pool_of_layer[layer] = 0;
  return pools;
}

ReplayPools pool_per_layer(const RoutingTrace& trace, uint32_t n_slot) {
  ReplayPools pools{std::vector<uint32_t>(trace.header.n_layer, kNoPool), {}};
  const std::vector<uint32_t> layers = routed_layers(trace);
  for (uint32_t i = 0; i < layers.size(); i++) {
    const auto n_layer = static_cast<uint32_t>(layers.size());
    pools.pool_of_layer[layers[i]] = i;
    pools.n_slot.push_back(n_slot / n_layer + (i < n_slot % n_layer ? 1 : 0));
  }
  return pools;
}

ReplayPools pool_per_record_size(const RoutingTrace& trace, uint32_t n_slot) {
  ReplayPools pools{std::vector<uint32_t>(trace.header.n_layer, kNoPool), {}};
  const std::vector<uint32_t> layers = routed_layers(trace);
  std::map<uint64_t, std::pair<uint32_t, uint32_t>> by_size;  // pool, layers in it
  for (const uint32_t layer : layers) {
    auto& [pool, n_layer] = by_size.try_emplace(record_bytes(trace, layer), by_size.size(), 0).first->second;
    pools.pool_of_layer[layer] = pool;
    n_layer++;
  }
  pools.n_slot.resize(by_size.size());
  for (const auto& [size, pool] : by_size) {
    const uint64_t share = uint64_t{n_slot} * pool.second / layers.size();
    pools.n_slot[pool.first] = static_cast<uint32_t>(std::max<uint64_t>(share, 1));
  }
  return pools;
}

Result<ReplayResult> replay(const RoutingTrace& trace, const ReplayOptions& options) {
  if (const Status status = check_options(trace, options); !status) return status.error();
  std::vector<PolicyPool> pools;
  for (const uint32_t n_slot : options.pools.n_slot) {
    PolicyOptions policy = options.policy;
    policy.n_slot = n_slot;
    policy.n_layer = trace.header.n_layer;
    policy.n_expert = trace.header.n_expert;
    pools.emplace_back(policy);
  }
  ReplayResult result;
  result.layers.resize(trace.header.n_layer);
  std::vector<ExpertCounters> warm_layers(trace.header.n_layer);
  DistinctExperts distinct(trace);
  for_each_call(trace, [&](size_t i, uint64_t forward, bool starts) {
    if (starts && i > 0) {
      for (PolicyPool& pool : pools) pool.advance();
    }
    const RoutingRecord& record = trace.records[i];
    const bool warm = forward < options.warm_forwards;
    const bool missed = pools[options.pools.pool_of_layer[record.layer]].call(record.layer, distinct.of(record),
                                                                              warm ? warm_layers : result.layers);
    if (warm) return;
    result.calls++;
    if (missed) result.calls_with_miss++;
  });
  finish(trace, options.warm_forwards, result);
  return result;
}

Result<ReplayResult> replay_bound(const RoutingTrace& trace, const ReplayOptions& options) {
  if (const Status status = check_options(trace, options); !status) return status.error();
  const uint32_t n_expert = trace.header.n_expert;
  const size_t n_experts = size_t{trace.header.n_layer} * n_expert;

  size_t n_warm = 0;  // records
  for_each_call(trace, [&](size_t, uint64_t forward, bool) { n_warm += forward < options.warm_forwards ? 1 : 0; });

  // Every request's next call, found from the end.
  std::vector<ForesightPool::Request> requests;
  std::vector<size_t> first_of(trace.records.size() + 1, 0);
  DistinctExperts distinct(trace);
  for (size_t i = 0; i < trace.records.size(); i++) {
    const RoutingRecord& record = trace.records[i];
    for (const uint32_t expert : distinct.of(record)) requests.push_back({size_t{record.layer} * n_expert + expert, 0});
    first_of[i + 1] = requests.size();
  }
  std::vector<uint64_t> next_call(n_experts, kNever);
  for (size_t i = trace.records.size(); i-- > 0;) {
    for (size_t j = first_of[i]; j < first_of[i + 1]; j++) {
      requests[j].next_use = next_call[requests[j].expert];
      next_call[requests[j].expert] = i;
    }
  }

  std::vector<ForesightPool> pools;
  for (const uint32_t n_slot : options.pools.n_slot) pools.emplace_back(n_slot, n_experts);
  ReplayResult result;
  result.layers.resize(trace.header.n_layer);
  std::vector<ExpertCounters> warm_layers(trace.header.n_layer);
  std::vector<ForesightPool::Request> call;
  // The warm forwards are one call for all that they asked for: it keeps what is asked for soonest after them.
  std::vector<std::vector<ForesightPool::Request>> warm_calls(pools.size());
  std::vector<bool> asked_again(n_experts, false);
  for (size_t i = n_warm; i-- > 0;) {
    for (size_t j = first_of[i]; j < first_of[i + 1]; j++) {
      const size_t expert = requests[j].expert;
      if (!asked_again[expert]) warm_calls[options.pools.pool_of_layer[trace.records[i].layer]].push_back(requests[j]);
      asked_again[expert] = true;
    }
  }
  for (size_t pool = 0; pool < pools.size(); pool++) pools[pool].call(0, n_expert, warm_calls[pool], warm_layers);

  for (size_t i = n_warm; i < trace.records.size(); i++) {
    const uint32_t layer = trace.records[i].layer;
    call.assign(requests.begin() + static_cast<ptrdiff_t>(first_of[i]),
                requests.begin() + static_cast<ptrdiff_t>(first_of[i + 1]));
    const bool missed = pools[options.pools.pool_of_layer[layer]].call(layer, n_expert, call, result.layers);
    result.calls++;
    if (missed) result.calls_with_miss++;
  }
  finish(trace, options.warm_forwards, result);
  return result;
}

}  // namespace sluice
