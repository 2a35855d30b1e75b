// The engine's counters, as one plain struct: what --stats, the plugin's statistics file and HTTP show. Filled by the
// loader and the backend, formatted by whoever asks.
//
// Definitions  request   one routed (token, choice) pair's expert, counted once per distinct expert, layer and batch
//              hit       the expert was ready in a slot when its layer asked for it
//              miss      it was not: a read some token waited for. A prefetch that came late is a miss.
//              load      a read that filled a slot
//              unplaced  an expert that found no slot at first and was computed in a later group of its batch
// Units        bytes, seconds, counts since the model was loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct ExpertCounters {
  uint64_t requests = 0;
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t loads = 0;
  uint64_t evictions = 0;
  uint64_t unplaced = 0;
  uint64_t bytes_read = 0;

  double hit_rate() const { return requests == 0 ? 0.0 : static_cast<double>(hits) / static_cast<double>(requests); }
  ExpertCounters& operator+=(const ExpertCounters& other) {
    requests += other.requests;
    hits += other.hits;
    misses += other.misses;
    loads += other.loads;
    evictions += other.evictions;
    unplaced += other.unplaced;
    bytes_read += other.bytes_read;
    return *this;
  }
};

// One of the drives that hold the model, when there are copies of it.
struct DriveStats {
  std::string path;       // its folder
  uint64_t reads = 0;     // ended there, well or badly
  uint64_t bytes = 0;
  uint64_t errors = 0;    // reads that failed there and were repeated elsewhere, or failed for good
  double mb_per_s = 0;    // as measured lately
  bool dropped = false;   // failed too often, or its copy was changed
};

// Where a prediction of a layer's experts comes from (predict/recall_probe.h).
enum class PredictionView : uint8_t { kBeforeAttention, kBlockInput, kLastToken };

// How many of the (token, choice) pairs of a layer a prediction had foreseen among its 1, 1.5 and 2 times top-k best.
struct RecallCounts {
  PredictionView view = PredictionView::kBeforeAttention;
  uint32_t distance = 1;  // in layers with experts; 0: the layer's own last choices
  uint32_t layer = 0;     // the predicted one
  uint64_t wanted = 0;
  uint64_t found_at_1x = 0;
  uint64_t found_at_1_5x = 0;
  uint64_t found_at_2x = 0;
};

// Speculative loads. A prefetch is one expert whose reads were begun because it was predicted.
struct PrefetchCounters {
  uint64_t predicted = 0;      // experts that predictions named, within their limits
  uint64_t submitted = 0;      // of them, begun: they were neither resident nor on their way
  uint64_t refused = 0;        // not begun: the side region was full, or the file had been changed
  uint64_t late = 0;           // not begun: the layer had started already
  uint64_t materialised = 0;   // reads that ended well
  uint64_t failed = 0;         // reads that did not; a demand reads again
  uint64_t cancelled = 0;      // dropped before they started
  uint64_t ready_on_time = 0;  // demanded when they were there: hits
  uint64_t not_ready = 0;      // demanded while on their way: misses
  uint64_t bytes = 0;          // that prefetches brought
  uint64_t bytes_taken = 0;    // of them, of experts that were demanded
  double seconds = 0;          // from a prefetch's begin to its end, summed
  double hidden_s = 0;         // stall that would have been: in each demand, the longest of the prefetches that were there

  uint64_t taken() const { return ready_on_time + not_ready; }
  PrefetchCounters& operator+=(const PrefetchCounters& other) {
    predicted += other.predicted;
    submitted += other.submitted;
    refused += other.refused;
    late += other.late;
    materialised += other.materialised;
    failed += other.failed;
    cancelled += other.cancelled;
    ready_on_time += other.ready_on_time;
    not_ready += other.not_ready;
    bytes += other.bytes;
    bytes_taken += other.bytes_taken;
    seconds += other.seconds;
    hidden_s += other.hidden_s;
    return *this;
  }
};

struct EngineStats {
  bool streaming = false;
  std::string model;               // what the experts are read from
  uint64_t budget_bytes = 0;       // what the pool may use
  uint64_t budget_bytes_min = 0;   // the smallest that works
  uint64_t expert_bytes = 0;       // of all routed experts in the file
  uint64_t slots = 0;
  std::string policy;              // that is in effect
  uint64_t pool_bytes = 0;         // slot memory and staging, without what was given back meanwhile
  uint64_t pool_shrinks = 0;       // how often memory was given back, and taken again
  uint64_t pool_grows = 0;
  ExpertCounters experts;
  std::vector<ExpertCounters> layers;  // by layer number; dense layers stay zero
  std::vector<std::vector<uint64_t>> choices;  // [layer][expert] how many tokens the router gave to it
  std::string io_path;             // "io_uring", "pread", "memory"
  bool io_direct = false;
  uint64_t io_reads = 0;
  uint64_t io_bytes = 0;
  uint64_t io_retries = 0;
  uint64_t io_errors = 0;
  std::vector<DriveStats> io_drives;  // empty when the model is on one drive
  double io_seconds = 0;           // at least one read was in flight
  double route_sync_s = 0;         // reading the router's choice and planning
  double stall_s = 0;              // waiting for reads with nothing left to compute
  double staging_s = 0;            // copies from staging buffers into slots
  double compute_s = 0;            // the expert computation, without the next
  double scatter_s = 0;            // copies of results to their (token, choice) places, and the weighted sums
  uint64_t fused_blocks = 0;       // blocks by the fused executor, by the generic one, and single products of blocks
  uint64_t generic_blocks = 0;     // that no graph held whole
  uint64_t lone_blocks = 0;
  std::string prefetch_mode = "off";  // "off", "probe", "on", "auto"
  std::vector<RecallCounts> recall;   // measured in probe mode
  PrefetchCounters prefetch;
  std::vector<PrefetchCounters> prefetch_layers;  // by layer number
  uint64_t prefetch_rows_dropped = 0;  // seen faster than predictions could be made
  uint64_t prefetch_trials = 0;      // times that `auto` compared with and without
  uint64_t prefetch_switches = 0;    // changes of its mind
  double prefetch_lens_s = 0;        // making predictions, on a thread of its own
  uint64_t prefetch_lens_bytes = 0;  // memory of the lenses
  uint64_t verified_slots = 0;     // slots compared with the file before use
  uint64_t verified_reads = 0;     // reads compared with the pack's checksums
};

}  // namespace sluice
