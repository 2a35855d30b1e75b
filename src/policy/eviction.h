// Which expert gives up its slot: one interface, pure implementations. Decides; moves no bytes, takes no locks, reads
// no clock, so that every decision can be replayed from a routing trace (policy/replay.h).
//
// A slot is known to the policy only while it is evictable: ready, and pinned by nobody. The pool tells the policy
// when that begins (release) and ends (acquire), so experts of the current call and pinned experts can never be
// chosen, and choosing needs no search.
//
// States   unknown -> release -> evictable -> acquire (hit, or chosen as victim) -> unknown.
// Units    slots are indexes below n_slot; time is counted in forwards (advance) and in accesses.
// Misuse   release of an evictable slot, of an expert that another evictable slot holds, acquire of a slot that is not
//          evictable, numbers out of range: assert.
// Threads  thread-compatible.
// Cost     O(1) or O(log n_slot) per call; no allocation after construction except for per-expert counters, which
//          are sized at construction.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/types.h"

namespace sluice {

enum class PolicyKind { kLru, kLfu, kLfru, kS3Fifo };
inline constexpr PolicyKind kPolicyKinds[] = {PolicyKind::kLru, PolicyKind::kLfu, PolicyKind::kLfru,
                                              PolicyKind::kS3Fifo};
const char* policy_name(PolicyKind kind);  // "lru", "lfu", "lfru", "s3fifo"
Result<PolicyKind> parse_policy(const std::string& text);

struct PolicyOptions {
  PolicyKind kind = PolicyKind::kLru;
  uint32_t n_slot = 0;
  uint32_t n_layer = 0;           // layer numbers are below this
  uint32_t n_expert = 0;          // expert ids are below this
  uint64_t decay_interval = 256;  // LFU: forwards between two halvings of all counts, at least 1
  uint64_t half_life = 64;        // LFRU: forwards after which an access counts half, at least 1
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The router asked for `id`, hit or miss; once per expert and acquire call.
  virtual void on_access(ExpertId id) = 0;
  // The slot holds `id`, is ready, and its last pin is gone.
  virtual void release(uint32_t slot, ExpertId id) = 0;
  // The slot stops being evictable: it was pinned again, or it was chosen.
  virtual void acquire(uint32_t slot) = 0;
  // The slot that should be given up next; empty when none is evictable. Does not change anything.
  virtual std::optional<uint32_t> victim() const = 0;
  // One forward (a pass over all layers) ended.
  virtual void advance() = 0;
};

std::unique_ptr<EvictionPolicy> make_policy(const PolicyOptions& options);

// The policy for a pool of `n_slot` that serves `n_layer` layers of `top_k` experts a token: `wanted`, except below one
// token's working set, where LRU and S3-FIFO push every expert out before its layer comes round again (0 % hits on
// cyclic use). Counting policies keep some of them there; the best of those measured is LFRU (docs/hit-rates.md).
PolicyKind policy_for_pool(PolicyKind wanted, uint64_t n_slot, uint32_t n_layer, uint32_t top_k);

}  // namespace sluice
