#include "moe/routing.h"

namespace sluice {

namespace {

constexpr uint32_t kNone = UINT32_MAX;

}  // namespace

Status Routing::set(const ggml_tensor* ids, uint32_t n_expert) {
  const int64_t n_token = ids->ne[1];
  top_k_ = static_cast<uint32_t>(ids->ne[0]);
  ids_.clear();
  experts_.clear();
  row_begin_.clear();
  index_of_.assign(n_expert, kNone);
  const char* data = static_cast<const char*>(ids->data);
  for (int64_t token = 0; token < n_token; ++token) {
    for (uint32_t choice = 0; choice < top_k_; ++choice) {
      const int32_t id = *reinterpret_cast<const int32_t*>(data + token * static_cast<int64_t>(ids->nb[1]) +
                                                           choice * static_cast<int64_t>(ids->nb[0]));
      if (id < 0 || static_cast<uint32_t>(id) >= n_expert) {
        return make_error(ErrorCode::kBadArgument, "the router chose expert {} for token {} of the batch, the layer has {} experts",
                          id, token, n_expert);
      }
      ids_.push_back(id);
      uint32_t& index = index_of_[static_cast<uint32_t>(id)];
      if (index == kNone) {
        index = static_cast<uint32_t>(experts_.size());
        experts_.push_back(static_cast<uint32_t>(id));
        row_begin_.push_back(0);
      }
      ++row_begin_[index];  // counts now, begins below
    }
  }
  uint32_t begin = 0;
  for (uint32_t& entry : row_begin_) {
    const uint32_t count = entry;
    entry = begin;
    begin += count;
  }
  row_begin_.push_back(begin);
  rows_.resize(ids_.size());
  for (uint32_t row = 0; row < ids_.size(); ++row) {
    rows_[row_begin_[index_of_[static_cast<uint32_t>(ids_[row])]]++] = row;
  }
  for (size_t i = row_begin_.size() - 1; i > 0; --i) row_begin_[i] = row_begin_[i - 1];
  row_begin_[0] = 0;
  return {};
}

}  // namespace sluice
