#include "loader/prefetcher.h"

#include <signal.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace sluice {

Prefetcher::Prefetcher(Loader& loader, std::shared_ptr<const LensSet> lenses, const PrefetcherOptions& options)
    : loader_(loader),
      lenses_(std::move(lenses)),
      look_ahead_(lenses_->layers(), options.plan.ahead),
      governed_(options.governed),
      governor_(options.governor),
      budget_(options.plan),
      spare_(kJobsMax + 1) {
  // Signals are for the caller's threads.
  sigset_t all;
  sigset_t callers;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &callers);
  try {
    worker_ = std::thread([this] { work(); });
  } catch (const std::system_error& refused) {
    log_warning_once("no thread for predictions, nothing is prefetched: {}", refused.what());
  }
  pthread_sigmask(SIG_SETMASK, &callers, nullptr);
}

Prefetcher::~Prefetcher() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  job_waits_.notify_all();
  if (worker_.joinable()) worker_.join();
}

bool Prefetcher::wants_output(uint32_t layer, size_t n_row) const {
  if (n_row == 0 || n_row > kRowsMax || !worker_.joinable()) return false;
  const auto target = look_ahead_.target_for(layer);
  return target && is_enabled(*target) && lenses_->find(*target) != nullptr && loader_.streams_layer(*target);
}

void Prefetcher::see_output(uint32_t layer, const float* rows, size_t n_row, size_t n_embd) {
  output_seen_ = true;
  if (wants_output(layer, n_row)) post(layer, false, rows, n_row, n_embd);
}

void Prefetcher::see_block(uint32_t layer, const float* rows, size_t n_row, size_t n_embd) {
  if (output_seen_ || !wants_output(layer, n_row)) return;
  const RouterLens* own = lenses_->find(layer);
  if (own != nullptr && own->n_embd() == n_embd) post(layer, true, rows, n_row, n_embd);
}

void Prefetcher::post(uint32_t layer, bool undo_norm, const float* rows, size_t n_row, size_t n_embd) {
  const uint32_t target = *look_ahead_.target_for(layer);
  if (lenses_->find(target)->n_embd() != n_embd) return;
  {
    std::lock_guard lock(mutex_);
    if (jobs_.size() >= kJobsMax) {
      spare_.push_back(std::move(jobs_.front()));
      jobs_.pop_front();
      ++dropped_;
    }
    Job job = std::move(spare_.back());
    spare_.pop_back();
    job.source = layer;
    job.target = target;
    job.undo_norm = undo_norm;
    job.demand = loader_.demands();
    job.n_row = n_row;
    job.n_embd = n_embd;
    job.rows.assign(rows, rows + n_row * n_embd);
    jobs_.push_back(std::move(job));
  }
  job_waits_.notify_one();
}

void Prefetcher::see_demand(uint32_t layer, size_t n_row, size_t n_wanted) {
  const int64_t now = now_ns();
  if (last_layer_ != UINT32_MAX && layer <= last_layer_) {
    end_forward();
    is_decode_ = true;
    forward_begin_ns_ = now;
  } else if (last_layer_ == UINT32_MAX) {
    is_decode_ = true;
    forward_begin_ns_ = now;
  }
  last_layer_ = layer;
  last_demand_ns_ = now;
  is_decode_ = is_decode_ && n_row <= kRowsMax;

  const RouterLens* own = lenses_->find(layer);
  const auto next = lenses_->layer_above(layer, 1);
  if (n_row <= kRowsMax || own == nullptr || !next || 2 * n_wanted < own->n_expert() || !is_enabled(*next)) return;
  const RouterLens* above = lenses_->find(*next);
  if (above == nullptr || !loader_.streams_layer(*next)) return;
  all_experts_.resize(above->n_expert());
  std::iota(all_experts_.begin(), all_experts_.end(), 0u);
  loader_.prefetch(*next, all_experts_, loader_.demands());
}

void Prefetcher::end_forward() {
  if (!governed_ || !is_decode_) return;
  governor_.note_forward(seconds_of(last_demand_ns_ - forward_begin_ns_));
  if (governor_.enabled()) {
    for (const uint32_t layer : lenses_->layers()) {
      if (judged_.size() <= layer) judged_.resize(layer + 1);
      const PrefetchCounters counters = loader_.prefetch_counters(layer);
      const PrefetchCounters& before = judged_[layer];
      governor_.note_layer(layer, counters.submitted - before.submitted, counters.taken() - before.taken());
      judged_[layer] = counters;
    }
  }
  std::lock_guard lock(mutex_);
  trials_ = governor_.trials();
  switches_ = governor_.switches();
}

void Prefetcher::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    job_waits_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    const int64_t begin_ns = now_ns();
    run(job);
    const int64_t end_ns = now_ns();
    lock.lock();
    lens_ns_ += end_ns - begin_ns;
    spare_.push_back(std::move(job));
    busy_ = false;
    job_done_.notify_all();
  }
}

void Prefetcher::run(const Job& job) {
  const RouterLens& lens = *lenses_->find(job.target);
  ranked_.resize(job.n_row);
  for (size_t i = 0; i < job.n_row; ++i) {
    std::span<const float> row(job.rows.data() + i * job.n_embd, job.n_embd);
    if (job.undo_norm) {
      lenses_->find(job.source)->undo_norm(row, row_);
      row = row_;
    }
    lens.rank(row, budget_.wanted(lens.top_k()), scratch_, ranked_[i]);
  }
  experts_.clear();
  budget_.take(job.source, job.target, ranked_, experts_);
  if (!experts_.empty()) loader_.prefetch(job.target, experts_, job.demand);
}

void Prefetcher::drain() {
  std::unique_lock lock(mutex_);
  job_done_.wait(lock, [this] { return jobs_.empty() && !busy_; });
}

void Prefetcher::add_stats(EngineStats& stats) const {
  std::lock_guard lock(mutex_);
  stats.prefetch_rows_dropped += dropped_;
  stats.prefetch_trials += trials_;
  stats.prefetch_switches += switches_;
  stats.prefetch_lens_s += seconds_of(lens_ns_);
  stats.prefetch_lens_bytes += lenses_->bytes();
}

}  // namespace sluice
