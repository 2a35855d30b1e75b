#include "scale_model/writer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "common/output_file.h"
#include "scale_model/rows.h"

namespace sluice::scale_model {
namespace {

constexpr uint64_t kPieceBytes = 4 * kMiB;

std::vector<std::byte> header_bytes(const ScalePlan& plan) {
  const GgufContextPtr header(gguf_init_empty());
  gguf_set_kv(header.get(), plan.metadata.get());
  ggml_context* shapes = ggml_init({plan.tensors.size() * ggml_tensor_overhead(), nullptr, true});
  for (const TensorPlan& tensor : plan.tensors) {
    ggml_tensor* shape =
        ggml_new_tensor(shapes, tensor.type, static_cast<int>(tensor.shape.size()), tensor.shape.data());
    ggml_set_name(shape, tensor.source.name.c_str());
    gguf_add_tensor(header.get(), shape);
  }
  std::vector<std::byte> bytes(gguf_get_meta_size(header.get()));
  gguf_get_meta_data(header.get(), bytes.data());
  ggml_free(shapes);
  return bytes;
}

class ScaledWriter {
 public:
  ScaledWriter(const Catalog& catalog, tools::OutputFile& file, const Progress& progress)
      : catalog_(catalog), file_(file), progress_(progress) {}

  Status write_tensor(const TensorPlan& tensor);

 private:
  Status write_rows(const TensorPlan& tensor, RowPadder& padder, uint64_t offset);
  Status write_zeros(uint64_t bytes);
  Status write(std::span<const std::byte> bytes);

  const Catalog& catalog_;
  tools::OutputFile& file_;
  const Progress& progress_;
  std::vector<std::byte> source_;
  std::vector<std::byte> piece_;
  uint64_t bytes_written_ = 0;
};

Status ScaledWriter::write(std::span<const std::byte> bytes) {
  bytes_written_ += bytes.size();
  progress_(bytes_written_);
  return file_.write(bytes);
}

Status ScaledWriter::write_zeros(uint64_t bytes) {
  piece_.assign(std::min(bytes, kPieceBytes), std::byte{0});
  while (bytes > 0) {
    const uint64_t count = std::min<uint64_t>(bytes, piece_.size());
    if (Status written = write(std::span(piece_).first(count)); !written) return written;
    bytes -= count;
  }
  return {};
}

// The rows of one group, which start at `offset` of the source file.
Status ScaledWriter::write_rows(const TensorPlan& tensor, RowPadder& padder, uint64_t offset) {
  const uint64_t from_bytes = tensor.source_row_bytes();
  const uint64_t to_bytes = tensor.row_bytes();
  const auto rows_max = static_cast<int64_t>(std::max<uint64_t>(1, kPieceBytes / to_bytes));
  for (int64_t first = 0; first < tensor.source_rows(); first += rows_max) {
    const auto count = static_cast<uint64_t>(std::min(rows_max, tensor.source_rows() - first));
    source_.resize(count * from_bytes);
    piece_.resize(count * to_bytes);
    const File& file = *catalog_.files[tensor.source.range.file];
    const uint64_t start = offset + static_cast<uint64_t>(first) * from_bytes;
    if (Status read = file.read_exactly(start, source_.data(), source_.size()); !read) return read;
    for (uint64_t row = 0; row < count; ++row) {
      Status padded = padder.pad(std::span<const std::byte>(source_).subspan(row * from_bytes, from_bytes),
                                 std::span(piece_).subspan(row * to_bytes, to_bytes));
      if (!padded) return make_error(padded.error().code, "'{}': {}", tensor.source.name, padded.error().text);
    }
    if (Status written = write(piece_); !written) return written;
  }
  return write_zeros(static_cast<uint64_t>(tensor.rows() - tensor.source_rows()) * to_bytes);
}

Status ScaledWriter::write_tensor(const TensorPlan& tensor) {
  if (!zero_bytes_are_zero_weights(tensor.type)) {
    return make_error(ErrorCode::kUnsupported, "'{}': {} has no zero that is all zero bytes", tensor.source.name,
                      ggml_type_name(tensor.type));
  }
  RowPadder padder(tensor.source.type, tensor.source.ne[0], tensor.type, tensor.shape[0], tensor.factor);
  const uint64_t group_bytes = static_cast<uint64_t>(tensor.source_rows()) * tensor.source_row_bytes();
  for (int64_t group = 0; group < tensor.slab_count * tensor.group_count; ++group) {
    Status written =
        write_rows(tensor, padder, tensor.source.range.offset + static_cast<uint64_t>(group) * group_bytes);
    if (!written) return written;
  }
  return {};
}

}  // namespace

uint64_t file_bytes(const ScalePlan& plan) {
  uint64_t bytes = header_bytes(plan).size();
  for (const TensorPlan& tensor : plan.tensors) bytes += align_up(tensor.bytes(), GGUF_DEFAULT_ALIGNMENT);
  return bytes;
}

Status write_scaled(const Catalog& catalog, const ScalePlan& plan, const std::string& out, const Progress& progress) {
  tools::OutputFile file(out);
  if (Status opened = file.open(); !opened) return opened;
  if (Status written = file.write(header_bytes(plan)); !written) return written;
  constexpr std::array<std::byte, GGUF_DEFAULT_ALIGNMENT> kPadding{};
  ScaledWriter writer(catalog, file, progress);
  for (const TensorPlan& tensor : plan.tensors) {
    if (Status written = writer.write_tensor(tensor); !written) return written;
    const uint64_t padding = align_up(tensor.bytes(), kPadding.size()) - tensor.bytes();
    if (Status written = file.write(std::span(kPadding).first(padding)); !written) return written;
  }
  return file.finish();
}

}  // namespace sluice::scale_model
