// What a pool would have done: plays a routing trace against an eviction policy and counts hits, misses and evictions
// without a model. loader/ and pool/ follow the protocol below, so the counters of a run without prefetch are predicted
// exactly by its own trace; the tests of both rely on it. Beside the policies stands a bound that none can beat.
//
// Pools     the slots are split into pools; each layer draws from one, each pool has a policy of its own. One pool for
//           all layers, one per layer and one per record size (as the engine does) are all cases of this.
// Protocol  of one layer call, a record of the trace, from the pool of its layer with C slots:
//           1. When the record starts a forward, and is not the first: advance() on every pool's policy.
//           2. The call's distinct experts are listed in order of first appearance over [token][choice].
//           3. In that order: on_access; the resident ones are acquired (hits). The others are misses.
//           4. In that order every miss takes an empty slot, else victim() and acquire (an eviction); from the first
//              that finds none on, misses are unplaced.
//           5. Only with unplaced experts. Line up all others, hits first, then placed misses, and the unplaced behind
//              them, each in the order above. For the first, second, ... unplaced expert: the first, second, ... of the
//              line is released, and the unplaced one takes a slot as in 4. (It was computed; its slot is free.)
//           6. What is still held is released in the order of 2.
// Counters  ExpertCounters as the engine's: a call asks for each distinct expert once; every miss is one load of its
//           layer's record; an eviction counts for the layer whose expert went. unplaced experts are misses too.
// Tokens    a forward's tokens are the largest n_token of its records: a model may drop rows before its last layer.
//
// Errors    kBadArgument: layer without a pool, a pool without slots.
// Threads   pure.
// Cost      about 0.1 us a request with LRU; memory O(n_slot + n_layer * n_expert), the bound O(requests).
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "policy/eviction.h"
#include "trace/engine_stats.h"
#include "trace/routing_trace.h"

namespace sluice {

inline constexpr uint32_t kNoPool = UINT32_MAX;

struct ReplayPools {
  std::vector<uint32_t> pool_of_layer;  // [n_layer]; kNoPool for layers that the trace does not have
  std::vector<uint32_t> n_slot;         // by pool, each at least 1
};

// One pool for every layer of the trace.
ReplayPools one_pool(const RoutingTrace& trace, uint32_t n_slot);
// n_slot split evenly over the layers that the trace has; the first ones get the remainder.
ReplayPools pool_per_layer(const RoutingTrace& trace, uint32_t n_slot);
// A pool for each size in the header's record_bytes, given slots in proportion to its experts (rounded down, at least
// 1). The same as one_pool where all sizes are equal or unknown.
ReplayPools pool_per_record_size(const RoutingTrace& trace, uint32_t n_slot);

// The layers that have records, rising.
std::vector<uint32_t> routed_layers(const RoutingTrace& trace);

struct ReplayOptions {
  ReplayPools pools;
  PolicyOptions policy;        // kind, decay_interval, half_life; the sizes are filled in
  uint64_t warm_forwards = 0;  // at the trace's start: they fill the pools and are not counted
};

struct ReplayResult {
  std::vector<ExpertCounters> layers;  // by layer number
  ExpertCounters total;
  uint64_t forwards = 0;  // counted ones
  uint64_t tokens = 0;
  uint64_t calls = 0;            // layer calls
  uint64_t calls_with_miss = 0;  // that had to wait for at least one read
};

Result<ReplayResult> replay(const RoutingTrace& trace, const ReplayOptions& options);

// The fewest misses that any choice of victims could reach, knowing the future, under the same pins (experts of the
// current call cannot go): Belady's MIN for calls that ask for several experts at once. Where a call has more experts
// than slots, the pool may keep any of them afterwards, and after warm forwards any of the experts they asked for: more
// than a policy can choose, so still a lower bound. options.policy is ignored.
Result<ReplayResult> replay_bound(const RoutingTrace& trace, const ReplayOptions& options);

}  // namespace sluice
