// What the pool's bookkeeping costs when every expert is a hit: a layer's experts are found, pinned, reported to the
// policy, and unpinned, as the loader does for each layer of each token. Time is per expert; it must not grow with the
// number of slots.
//
//   pool_bench --benchmark_filter=lfru
//
// Arguments: the number of slots, all filled; 8 experts a call, layers in turn, experts drawn at random beforehand.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <vector>

#include "pool/resident_pool.h"

namespace sluice {
namespace {

constexpr uint32_t kTopK = 8;
constexpr uint32_t kExpertsMax = 512;

void acquire_hits(benchmark::State& state, PolicyKind policy) {
  const auto n_slot = static_cast<uint32_t>(state.range(0));
  const uint32_t n_layer = std::max(1U, n_slot / kExpertsMax);
  const uint32_t n_expert = n_slot / n_layer;
  PoolSpec spec;
  spec.classes = {{.slot_bytes = 64, .n_slot = n_slot}};
  spec.layer_class.assign(n_layer, 0);
  spec.n_expert = n_expert;
  spec.policy = policy;
  auto pool = std::move(ResidentPool::create(spec)).value();
  // Filled in no order, as by a router: neighbours in a layer are not neighbours in the pool.
  std::mt19937 random(1);
  std::vector<ExpertId> all;
  for (uint32_t layer = 0; layer < n_layer; ++layer) {
    for (uint32_t expert = 0; expert < n_expert; ++expert) all.push_back({layer, expert});
  }
  std::shuffle(all.begin(), all.end(), random);
  for (const ExpertId id : all) {
    const SlotRef slot = *pool->begin_load(id);
    pool->finish_load(slot);
    pool->unpin(slot);
  }
  std::vector<ExpertId> requests;
  for (uint32_t call = 0; call < 64 * n_layer; ++call) {
    std::vector<uint32_t> chosen;
    while (chosen.size() < kTopK) {
      const auto expert =
          static_cast<uint32_t>(std::min(random() % n_expert, random() % n_expert));  // some are hotter than others
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
    }
    for (const uint32_t expert : chosen) requests.push_back({call % n_layer, expert});
  }
  size_t at = 0;
  SlotRef pinned[kTopK];
  for (auto _ : state) {
    for (uint32_t i = 0; i < kTopK; ++i) {
      const ExpertId id = requests[at + i];
      pool->note_access(id);
      pinned[i] = *pool->find(id);
      pool->pin(pinned[i]);
    }
    for (const SlotRef slot : pinned) pool->unpin(slot);
    at += kTopK;
    if (at == requests.size()) {
      at = 0;
    }
    if (at % (size_t{n_layer} * kTopK) == 0) pool->advance();
  }
  state.SetItemsProcessed(state.iterations() * kTopK);
  state.counters["ns_per_expert"] = benchmark::Counter(static_cast<double>(state.iterations() * kTopK) * 1e-9,
                                                       benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

BENCHMARK_CAPTURE(acquire_hits, lru, PolicyKind::kLru)->Arg(100)->Arg(10'000)->Arg(60'000);
BENCHMARK_CAPTURE(acquire_hits, lfu, PolicyKind::kLfu)->Arg(100)->Arg(10'000)->Arg(60'000);
BENCHMARK_CAPTURE(acquire_hits, lfru, PolicyKind::kLfru)->Arg(100)->Arg(10'000)->Arg(60'000);
BENCHMARK_CAPTURE(acquire_hits, s3fifo, PolicyKind::kS3Fifo)->Arg(100)->Arg(10'000)->Arg(60'000);

}  // namespace
}  // namespace sluice

BENCHMARK_MAIN();
