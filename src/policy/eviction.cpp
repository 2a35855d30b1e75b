#include "policy/eviction.h"

#include "base/assert.h"
#include "policy/frequency_policy.h"
#include "policy/lru_policy.h"
#include "policy/s3fifo_policy.h"

namespace sluice {

const char* policy_name(PolicyKind kind) {
  switch (kind) {
    case PolicyKind::kLru: return "lru";
    case PolicyKind::kLfu: return "lfu";
    case PolicyKind::kLfru: return "lfru";
    case PolicyKind::kS3Fifo: return "s3fifo";
  }
  SLUICE_ASSERT(false, "policy kind {}", static_cast<int>(kind));
}

Result<PolicyKind> parse_policy(const std::string& text) {
  for (const PolicyKind kind : kPolicyKinds) {
    if (text == policy_name(kind)) return kind;
  }
  return make_error(ErrorCode::kBadArgument, "policy: wanted lru, lfu, lfru or s3fifo, given '{}'", text);
}

std::unique_ptr<EvictionPolicy> make_policy(const PolicyOptions& options) {
  switch (options.kind) {
    case PolicyKind::kLru: return std::make_unique<LruPolicy>(options);
    case PolicyKind::kLfu:
    case PolicyKind::kLfru: return std::make_unique<FrequencyPolicy>(options);
    case PolicyKind::kS3Fifo: return std::make_unique<S3FifoPolicy>(options);
  }
  SLUICE_ASSERT(false, "policy kind {}", static_cast<int>(options.kind));
}

PolicyKind policy_for_pool(PolicyKind wanted, uint64_t n_slot, uint32_t n_layer, uint32_t top_k) {
  const bool counts_uses = wanted == PolicyKind::kLfu || wanted == PolicyKind::kLfru;
  return counts_uses || n_slot >= uint64_t{n_layer} * top_k ? wanted : PolicyKind::kLfru;
}

}  // namespace sluice
