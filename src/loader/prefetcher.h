// Turns what is seen of the model into prefetches: router lenses on a thread of their own, the plan's limits, and the
// judgement whether it pays. Knows no graph (backend/ shows it rows) and no slots (loader/loader.h has them).
//
// Views    see_output: the residual stream between two layers; see_block: the input of a block, which is used until an
//          output has been seen, as in a stock tool. Both copy the rows and return; the lens runs on the worker.
// Prompts  where a layer asks for most of its experts, the next one will too: its experts are then streamed ahead in
//          their order, without a lens, as far as the side region goes.
// Governed with `governed`, prefetching must earn its place (loader/prefetch_governor.h); while it is off, no row is
//          asked for. A forward's time is from its first demand to its last, so that pauses between forwards do not
//          count.
// Behind   a worker that falls behind drops the oldest rows.
// Threads  see_* from the one thread that computes; add_stats from any.
// Lifetime the loader outlives it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "loader/loader.h"
#include "loader/prefetch_governor.h"
#include "predict/lens_set.h"
#include "predict/look_ahead.h"
#include "predict/prefetch_plan.h"
#include "trace/engine_stats.h"

namespace sluice {

struct PrefetcherOptions {
  PrefetchPlan plan;
  bool governed = false;
  PrefetchGovernorOptions governor;
};

class Prefetcher {
 public:
  // More rows than these are a prompt's.
  static constexpr size_t kRowsMax = 8;

  Prefetcher(Loader& loader, std::shared_ptr<const LensSet> lenses, const PrefetcherOptions& options);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;

  // Whether see_output has a use for these rows.
  bool wants_output(uint32_t layer, size_t n_row) const;
  void see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd);
  void see_block(uint32_t layer, const float* rows, size_t n_row, size_t n_embd);
  // A layer's demand has been started, for `n_row` tokens and `n_wanted` distinct experts.
  void see_demand(uint32_t layer, size_t n_row, size_t n_wanted);

  // Waits until the worker has nothing to do.
  void drain();
  void add_stats(EngineStats& stats) const;

 private:
  static constexpr size_t kJobsMax = 4;

  struct Job {
    uint32_t source = 0;
    uint32_t target = 0;
    bool undo_norm = false;  // rows are the input of the source's block
    uint64_t demand = 0;     // the loader's count when the rows were seen
    size_t n_row = 0;
    size_t n_embd = 0;
    std::vector<float> rows;
  };

  bool is_enabled(uint32_t layer) const { return !governed_ || governor_.enabled(layer); }
  void post(uint32_t layer, bool undo_norm, const float* rows, size_t n_row, size_t n_embd);
  void end_forward();
  void work();
  void run(const Job& job);

  Loader& loader_;
  std::shared_ptr<const LensSet> lenses_;
  LookAhead look_ahead_;
  bool governed_;

  // The computing thread's.
  PrefetchGovernor governor_;
  bool output_seen_ = false;
  uint32_t last_layer_ = UINT32_MAX;
  bool is_decode_ = false;  // every demand of the forward had few rows
  int64_t forward_begin_ns_ = 0;
  int64_t last_demand_ns_ = 0;
  std::vector<PrefetchCounters> judged_;  // by layer, what the governor was told
  std::vector<uint32_t> all_experts_;

  // The worker's.
  PrefetchBudget budget_;
  RouterLens::Scratch scratch_;
  std::vector<float> row_;
  std::vector<std::vector<ExpertScore>> ranked_;
  std::vector<uint32_t> experts_;

  mutable std::mutex mutex_;
  std::condition_variable job_waits_;
  std::condition_variable job_done_;
  std::deque<Job> jobs_;
  std::vector<Job> spare_;
  bool busy_ = false;
  bool stopping_ = false;
  uint64_t dropped_ = 0;
  uint64_t trials_ = 0;
  uint64_t switches_ = 0;
  int64_t lens_ns_ = 0;
  std::thread worker_;  // last: it uses the others
};

}  // namespace sluice
