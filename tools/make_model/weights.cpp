#include "make_model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/bytes.h"
#include "make_model/random.h"

namespace sluice::make_model {
namespace {

constexpr uint64_t kPieceBytes = 8 * kMiB;
// Weights that one thread holds as floats at a time.
constexpr int64_t kBatchElements = int64_t{1} << 16;

int64_t rows_within(uint64_t bytes_max, const TensorPlan& tensor) {
  return std::max<int64_t>(1, static_cast<int64_t>(bytes_max / tensor.row_bytes()));
}

// Rows [first, end): each has its own random stream, so neither batches nor threads show in the result.
void generate_share(const TensorPlan& tensor, uint64_t key, int64_t first, int64_t end, std::byte* out) {
  const Distribution& distribution = tensor.distribution;
  const int64_t row_elements = tensor.row_elements();
  const int64_t batch_rows = std::max<int64_t>(1, kBatchElements / row_elements);
  const std::vector<float> importance(ggml_quantize_requires_imatrix(tensor.type) ? row_elements : 0, 1.0F);
  std::vector<float> floats(batch_rows * row_elements);
  for (int64_t row = first; row < end; row += batch_rows) {
    const int64_t count = std::min(batch_rows, end - row);
    for (int64_t i = 0; i < count; ++i) {
      Random random(key + static_cast<uint64_t>(row + i));
      const float factor = distribution.row_factors.empty() ? 1.0F : distribution.row_factors[row + i];
      const float deviation = distribution.deviation * factor;
      const float mean = distribution.mean * factor;
      float* target = &floats[i * row_elements];
      for (int64_t j = 0; j < row_elements; ++j) target[j] = mean + deviation * random.normal();
    }
    out += ggml_quantize_chunk(tensor.type, floats.data(), out, 0, count, row_elements,
                               importance.empty() ? nullptr : importance.data());
  }
}

}  // namespace

Status WeightMaker::make(const TensorPlan& tensor, const Sink& sink) {
  if (!tensor.distribution.values.empty()) return sink(std::as_bytes(std::span(tensor.distribution.values)));
  const bool is_large = tensor.row_count() * tensor.row_elements() > kFreshElements;
  return is_large && tensor.of_experts ? make_from_stock(tensor, sink) : make_fresh(tensor, sink);
}

Status WeightMaker::make_fresh(const TensorPlan& tensor, const Sink& sink) {
  const uint64_t key = stream_key(seed_, tensor.name);
  const int64_t piece_rows = std::min(rows_within(kPieceBytes, tensor), tensor.row_count());
  for (int64_t row = 0; row < tensor.row_count(); row += piece_rows) {
    const int64_t count = std::min(piece_rows, tensor.row_count() - row);
    piece_.resize(count * tensor.row_bytes());
    generate_rows(tensor, key, row, count, piece_.data());
    if (Status written = sink(piece_); !written.ok()) return written;
  }
  return {};
}

Status WeightMaker::make_from_stock(const TensorPlan& tensor, const Sink& sink) {
  const Stock& stock = stock_for(tensor);
  const uint64_t row_bytes = tensor.row_bytes();
  const auto stock_rows = static_cast<uint32_t>(stock.row_count);
  const int64_t slab_rows = tensor.shape[1];
  const int64_t piece_rows = std::min(rows_within(kPieceBytes, tensor), slab_rows);
  Random random(seed_, tensor.name);
  const uint64_t first_row = random.below(stock_rows);
  for (int64_t expert = 0; expert < tensor.shape[2]; ++expert) {
    for (int64_t row = 0; row < slab_rows; row += piece_rows) {
      const int64_t count = std::min(piece_rows, slab_rows - row);
      piece_.resize(count * row_bytes);
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t choice =
            row + i == 0 ? (first_row + static_cast<uint64_t>(expert)) % stock_rows : random.below(stock_rows);
        std::memcpy(&piece_[i * row_bytes], &stock.rows[choice * row_bytes], row_bytes);
      }
      if (Status written = sink(piece_); !written.ok()) return written;
    }
  }
  return {};
}

const WeightMaker::Stock& WeightMaker::stock_for(const TensorPlan& tensor) {
  const float deviation = tensor.distribution.deviation;
  Stock& stock = stocks_[{tensor.type, tensor.row_elements(), deviation}];
  if (stock.rows.empty()) {
    stock.row_count = std::max(kFreshElements / tensor.row_elements(), tensor.shape[2]);
    stock.rows.resize(stock.row_count * tensor.row_bytes());
    const uint64_t key =
        stream_key(seed_, fmt::format("{} {} {:a}", ggml_type_name(tensor.type), tensor.row_elements(), deviation));
    generate_rows(tensor, key, 0, stock.row_count, stock.rows.data());
  }
  return stock;
}

void WeightMaker::generate_rows(const TensorPlan& tensor, uint64_t key, int64_t first, int64_t count, std::byte* out) {
  ggml_quantize_init(tensor.type);  // not left to the threads: the first call of a type builds its tables
  const int64_t share = (count + thread_count_ - 1) / thread_count_;
  std::vector<std::jthread> threads;
  for (int64_t begin = share; begin < count; begin += share) {
    threads.emplace_back(generate_share, std::cref(tensor), key, first + begin, first + std::min(begin + share, count),
                         out + begin * tensor.row_bytes());
  }
  generate_share(tensor, key, first, first + std::min(share, count), out);
}

}  // namespace sluice::make_model
