// Slow, obvious twins of the eviction policies: everything is found by looking at everything. They speak the policies'
// own interface, so that one driver can feed both.
#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "policy/eviction.h"

namespace sluice {

class LruTwin final : public EvictionPolicy {
 public:
  explicit LruTwin(const PolicyOptions&) {}
  void on_access(ExpertId) override {}
  void release(uint32_t slot, ExpertId) override { released_at_[slot] = now_++; }
  void acquire(uint32_t slot) override { released_at_.erase(slot); }
  std::optional<uint32_t> victim() const override {
    std::optional<uint32_t> oldest;
    for (const auto& [slot, at] : released_at_) {
      if (!oldest || at < released_at_.at(*oldest)) oldest = slot;
    }
    return oldest;
  }
  void advance() override {}

 private:
  std::map<uint32_t, uint64_t> released_at_;
  uint64_t now_ = 0;
};

class FrequencyTwin final : public EvictionPolicy {
 public:
  explicit FrequencyTwin(const PolicyOptions& options) : options_(options) {}
  void on_access(ExpertId id) override { scores_[id] += weight(); }
  void release(uint32_t slot, ExpertId id) override { evictable_[slot] = {id, now_++}; }
  void acquire(uint32_t slot) override { evictable_.erase(slot); }
  std::optional<uint32_t> victim() const override {
    std::optional<uint32_t> worst;
    for (const auto& [slot, state] : evictable_) {
      if (!worst || key(state) < key(evictable_.at(*worst))) worst = slot;
    }
    return worst;
  }
  void advance() override {
    if (++forward_ % interval() != 0) return;
    for (auto& [id, score] : scores_) score /= 2;
  }

 private:
  struct State {
    ExpertId id;
    uint64_t released_at = 0;
  };
  uint64_t interval() const { return options_.kind == PolicyKind::kLfu ? options_.decay_interval : options_.half_life; }
  uint64_t weight() const {
    if (options_.kind == PolicyKind::kLfu) return 1;
    return (1 << 20) + (1 << 20) * (forward_ % interval()) / interval();
  }
  std::pair<uint64_t, uint64_t> key(const State& state) const {
    const auto it = scores_.find(state.id);
    return {it == scores_.end() ? 0 : it->second, state.released_at};
  }

  PolicyOptions options_;
  std::map<ExpertId, uint64_t> scores_;
  std::map<uint32_t, State> evictable_;
  uint64_t forward_ = 0;
  uint64_t now_ = 0;
};

// The queues as lists, oldest first, in which pinned and gone slots keep their places.
class S3FifoTwin final : public EvictionPolicy {
 public:
  explicit S3FifoTwin(const PolicyOptions& options)
      : small_target_(std::max<size_t>(options.n_slot / 10, 1)), ghost_capacity_(options.n_slot - small_target_) {}

  void on_access(ExpertId id) override {
    for (std::list<Node>* queue : {&queues_.small, &queues_.main}) {
      for (Node& node : *queue) {
        if (node.id != id || node.gone) continue;
        node.uses = std::min(node.uses + 1, 3);
        node.requested = true;
      }
    }
  }
  void release(uint32_t slot, ExpertId id) override {
    Node* known = find(queues_, slot);
    if (known != nullptr && known->id == id) {
      if (known->gone) forget_ghost(id);
      known->evictable = true;
      known->gone = known->requested = false;
      return;
    }
    const auto is_slot = [slot](const Node& node) { return node.slot == slot; };
    queues_.small.remove_if(is_slot);
    queues_.main.remove_if(is_slot);
    const size_t first = ghosts_.size() - std::min(ghosts_.size(), ghost_capacity_);
    const bool was_ghost =
        std::find(ghosts_.begin() + static_cast<ptrdiff_t>(first), ghosts_.end(), id) != ghosts_.end();
    forget_ghost(id);
    (was_ghost ? queues_.main : queues_.small).push_back({slot, id, 0, true, false, false});
  }
  void acquire(uint32_t slot) override {
    Node* node = find(queues_, slot);
    node->evictable = false;
    if (node->requested) return;
    node->evictable = true;
    if (victim() == slot) run(queues_);
    node = find(queues_, slot);
    node->evictable = false;
    node->gone = true;
    for (const Node& in_small : queues_.small) {
      if (in_small.slot == slot) ghosts_.push_back(node->id);
    }
  }
  std::optional<uint32_t> victim() const override {
    Queues copy = queues_;
    return run(copy);
  }
  void advance() override {}

 private:
  struct Node {
    uint32_t slot = 0;
    ExpertId id;
    int uses = 0;
    bool evictable = false;
    bool requested = false;
    bool gone = false;
  };
  struct Queues {
    std::list<Node> small;
    std::list<Node> main;
  };

  static Node* find(Queues& queues, uint32_t slot) {
    for (std::list<Node>* queue : {&queues.small, &queues.main}) {
      for (Node& node : *queue) {
        if (node.slot == slot) return &node;
      }
    }
    return nullptr;
  }
  static std::list<Node>::iterator oldest(std::list<Node>& queue) {
    return std::find_if(queue.begin(), queue.end(), [](const Node& node) { return node.evictable; });
  }
  void forget_ghost(ExpertId id) {
    for (std::optional<ExpertId>& ghost : ghosts_) {
      if (ghost == id) ghost.reset();
    }
  }

  // The eviction, up to finding its victim.
  std::optional<uint32_t> run(Queues& queues) const {
    const auto n_small = std::count_if(queues.small.begin(), queues.small.end(), [](const Node& n) { return !n.gone; });
    if (static_cast<size_t>(n_small) >= small_target_ || oldest(queues.main) == queues.main.end()) {
      for (auto it = oldest(queues.small); it != queues.small.end(); it = oldest(queues.small)) {
        if (it->uses < 2) return it->slot;
        it->uses = 0;
        queues.main.splice(queues.main.end(), queues.small, it);
      }
    }
    for (auto it = oldest(queues.main); it != queues.main.end(); it = oldest(queues.main)) {
      if (it->uses == 0) return it->slot;
      it->uses--;
      queues.main.splice(queues.main.end(), queues.main, it);
    }
    return std::nullopt;
  }

  size_t small_target_;
  size_t ghost_capacity_;
  Queues queues_;
  std::vector<std::optional<ExpertId>> ghosts_;  // every entry ever made; taken ones are blank
};

inline std::unique_ptr<EvictionPolicy> make_twin(const PolicyOptions& options) {
  switch (options.kind) {
    case PolicyKind::kLru: return std::make_unique<LruTwin>(options);
    case PolicyKind::kLfu:
    case PolicyKind::kLfru: return std::make_unique<FrequencyTwin>(options);
    case PolicyKind::kS3Fifo: return std::make_unique<S3FifoTwin>(options);
  }
  return nullptr;
}

}  // namespace sluice
