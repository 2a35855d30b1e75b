#include "make_model/writer.h"

#include <fmt/format.h>

#include <array>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "common/output_file.h"

namespace sluice::make_model {
namespace {

// Tensors in order, in parts of about equal size; each gets one at least.
std::vector<std::span<const TensorPlan>> divide(const ModelPlan& plan, uint32_t part_count) {
  const std::span<const TensorPlan> tensors = plan.tensors;
  const uint64_t total = plan.tensor_bytes();
  std::vector<std::span<const TensorPlan>> parts;
  size_t begin = 0;
  uint64_t taken = 0;
  for (uint32_t part = 0; part < part_count; ++part) {
    const size_t end_max = tensors.size() - (part_count - part - 1);
    size_t end = begin;
    do {
      taken += tensors[end++].bytes();
    } while (end < end_max && (part + 1 == part_count || taken < total / part_count * (part + 1)));
    parts.push_back(tensors.subspan(begin, end - begin));
    begin = end;
  }
  return parts;
}

// The header of one part: keys, tensor descriptions, padding up to the data.
std::vector<std::byte> part_header(const ModelPlan& plan, std::span<const TensorPlan> tensors, uint32_t part,
                                   uint32_t part_count) {
  const GgufContext header(gguf_init_empty());
  if (part == 0) gguf_set_kv(header.get(), plan.metadata.get());
  if (part_count > 1) {
    gguf_set_val_u16(header.get(), "split.no", static_cast<uint16_t>(part));
    gguf_set_val_u16(header.get(), "split.count", static_cast<uint16_t>(part_count));
    gguf_set_val_i32(header.get(), "split.tensors.count", static_cast<int32_t>(plan.tensors.size()));
  }
  ggml_context* shapes = ggml_init({tensors.size() * ggml_tensor_overhead(), nullptr, true});
  for (const TensorPlan& tensor : tensors) {
    ggml_tensor* shape =
        ggml_new_tensor(shapes, tensor.type, static_cast<int>(tensor.shape.size()), tensor.shape.data());
    ggml_set_name(shape, tensor.name.c_str());
    gguf_add_tensor(header.get(), shape);
  }
  std::vector<std::byte> bytes(gguf_get_meta_size(header.get()));
  gguf_get_meta_data(header.get(), bytes.data());
  ggml_free(shapes);
  return bytes;
}

}  // namespace

std::vector<std::string> part_paths(const std::string& out, uint32_t part_count) {
  if (part_count == 1) return {out};
  constexpr std::string_view kSuffix = ".gguf";
  const std::string prefix = out.ends_with(kSuffix) ? out.substr(0, out.size() - kSuffix.size()) : out;
  std::vector<std::string> paths;
  for (uint32_t part = 0; part < part_count; ++part) {
    paths.push_back(fmt::format("{}-{:05}-of-{:05}.gguf", prefix, part + 1, part_count));
  }
  return paths;
}

Status write_model(const ModelPlan& plan, WeightMaker& weights, const std::string& out, uint32_t part_count,
                   const Progress& progress) {
  if (part_count > plan.tensors.size()) {
    return make_error(ErrorCode::kBadArgument, "--split must be at most the number of tensors, {}, not {}",
                      plan.tensors.size(), part_count);
  }
  const std::vector<std::string> paths = part_paths(out, part_count);
  const std::vector<std::span<const TensorPlan>> parts = divide(plan, part_count);
  constexpr std::array<std::byte, GGUF_DEFAULT_ALIGNMENT> kPadding{};
  uint64_t bytes_written = 0;
  for (uint32_t part = 0; part < part_count; ++part) {
    tools::OutputFile file(paths[part]);
    if (Status opened = file.open(); !opened.ok()) return opened;
    if (Status written = file.write(part_header(plan, parts[part], part, part_count)); !written.ok()) return written;
    for (const TensorPlan& tensor : parts[part]) {
      Status made = weights.make(tensor, [&](std::span<const std::byte> bytes) {
        bytes_written += bytes.size();
        progress(bytes_written);
        return file.write(bytes);
      });
      if (!made.ok()) return made;
      const uint64_t padding = align_up(tensor.bytes(), kPadding.size()) - tensor.bytes();
      if (Status padded = file.write(std::span(kPadding).first(padding)); !padded.ok()) return padded;
    }
    if (Status finished = file.finish(); !finished.ok()) return finished;
  }
  return {};
}

}  // namespace sluice::make_model
