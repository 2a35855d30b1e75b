// How a model grows by zero padding without a change to what it computes: which tensors get longer rows, more rows, or
// a power of two on their weights. Reads no weights and writes nothing (scale_model/writer.h does).
//
// Width    The residual stream becomes k = 1, 4, 16 or 64 times as wide, its new elements always zero. RMSNorm divides
//          by the root of the mean square, which would fall to 1/k. So everything that writes to the stream (the
//          embedding and the down and output projections) is multiplied by s = sqrt(k): the mean square is what it was,
//          and the model's one epsilon, which the norms over heads use too, stays as it is. The norms over the stream
//          divide by s again in their weights. As s is a power of two, each of these steps is exact in floating point,
//          in quantised blocks too (only the blocks' own scale is multiplied), and every norm gives its old bits.
// Experts  Their inner width grows by zero rows of gate and up and zero columns of down: silu(0) * 0 = 0.
// Kept     heads, keys and values, DeltaNet, router width, experts, vocabulary.
// Rounding What remains is the order in which a kernel adds up a dot product: it may take a row's last, odd block
// apart,
//          which is no longer the last once zeros follow it.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "store/catalog.h"
#include "store/gguf_header.h"

namespace sluice::scale_model {

struct ScaleOptions {
  uint32_t width_factor = 4;
  std::optional<int64_t> ff;         // inner width of an expert; the model's own if empty
  std::optional<int64_t> shared_ff;  // of the shared expert
  std::optional<ggml_type> type;     // of the experts
};

// One tensor before and after. It is `slab_count` matrices of `group_count` groups of rows (gate and up in one tensor
// are two); every group gets zero rows at its end, every row zeros at its end.
struct TensorPlan {
  CatalogTensor source;
  ggml_type type = GGML_TYPE_F32;
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  float factor = 1.0F;  // a power of two
  int64_t slab_count = 1;
  int64_t group_count = 1;

  int64_t source_rows() const { return source.ne[1] / group_count; }  // of one group
  int64_t rows() const { return shape[1] / group_count; }
  uint64_t source_row_bytes() const { return ggml_row_size(source.type, source.ne[0]); }
  uint64_t row_bytes() const { return ggml_row_size(type, shape[0]); }
  uint64_t bytes() const { return row_bytes() * static_cast<uint64_t>(shape[1] * slab_count); }
};

struct ScalePlan {
  GgufContextPtr metadata;  // every key; no tensors
  std::vector<TensorPlan> tensors;
  uint64_t record_bytes = 0;  // one expert of the widest layer

  uint64_t tensor_bytes() const;
};

// kUnsupported names the architecture or the tensor for which padding is not known to be exact; kBadArgument an option,
// what was wanted and what was given.
Result<ScalePlan> plan_scaling(const Catalog& catalog, const ScaleOptions& options);

}  // namespace sluice::scale_model
