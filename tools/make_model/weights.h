// Makes a tensor's bytes from its plan and the seed, in pieces of bounded size. Writes no file.
//
// Small tensors are random throughout. Those of the experts beyond kFreshElements draw their rows from a stock of
// already quantised random rows, which is shared by all tensors of one type, row length and deviation: quantising
// every weight of a large model would take far longer than writing it. Each expert takes another row of the stock as
// its first and random ones after it, so no two slabs of a model hold the same bytes.
//
// Owns     the stocks, at most kFreshElements weights each (more only for rows so long that every expert's first row
//          needs it), one for each combination that the model uses.
// Threads  thread-compatible; generates with its own threads. The bytes do not depend on their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "base/result.h"
#include "make_model/plan.h"

namespace sluice::make_model {

class WeightMaker {
 public:
  static constexpr int64_t kFreshElements = int64_t{1} << 23;

  WeightMaker(uint64_t seed, uint32_t thread_count) : seed_(seed), thread_count_(thread_count) {}

  // Calls `sink` with the tensor's bytes in order; stops at its first error and returns it. The span is valid during
  // the call only.
  using Sink = std::function<Status(std::span<const std::byte> bytes)>;
  Status make(const TensorPlan& tensor, const Sink& sink);

 private:
  struct Stock {
    int64_t row_count = 0;
    std::vector<std::byte> rows;
  };
  using StockKey = std::tuple<ggml_type, int64_t, float>;

  Status make_fresh(const TensorPlan& tensor, const Sink& sink);
  Status make_from_stock(const TensorPlan& tensor, const Sink& sink);
  const Stock& stock_for(const TensorPlan& tensor);
  // Rows [first, first + count) of the stream `key`, quantised to `out`.
  void generate_rows(const TensorPlan& tensor, uint64_t key, int64_t first, int64_t count, std::byte* out);

  const uint64_t seed_;
  const uint32_t thread_count_;
  std::map<StockKey, Stock> stocks_;
  std::vector<std::byte> piece_;
};

}  // namespace sluice::make_model
