#include "store/merged_gguf.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "store/gguf_header.h"

namespace sluice {

namespace {

std::vector<uint8_t> meta_data(const gguf_context* context) {
  std::vector<uint8_t> bytes(gguf_get_meta_size(context));
  gguf_get_meta_data(context, bytes.data());
  return bytes;
}

// An empty GGUF whose tensors will be placed at `alignment`: gguf_set_val_u32 sets the key alone, only reading a header
// makes it count.
GgufContextPtr empty_context(uint32_t alignment) {
  GgufContextPtr context(gguf_init_empty());
  if (alignment == GGUF_DEFAULT_ALIGNMENT) return context;
  gguf_set_val_u32(context.get(), GGUF_KEY_GENERAL_ALIGNMENT, alignment);
  const std::vector<uint8_t> bytes = meta_data(context.get());
  context.reset(gguf_init_from_buffer(bytes.data(), bytes.size(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
  SLUICE_ASSERT(context != nullptr, "ggml does not read its own header with alignment {}", alignment);
  return context;
}

void add_tensor(gguf_context* context, const CatalogTensor& source) {
  ggml_tensor tensor{};
  tensor.type = source.type;
  std::copy(std::begin(source.ne), std::end(source.ne), std::begin(tensor.ne));
  tensor.nb[0] = ggml_type_size(source.type);
  tensor.nb[1] = ggml_row_size(source.type, source.ne[0]);
  for (int i = 2; i < GGML_MAX_DIMS; ++i) tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(source.ne[i - 1]);
  ggml_set_name(&tensor, source.name.c_str());
  gguf_add_tensor(context, &tensor);
}

}  // namespace

Result<MergedGguf> merge_gguf(const Catalog& catalog, const std::function<void(gguf_context*)>& edit) {
  for (const auto& file : catalog.files) {
    const Status unchanged = file->check_unchanged();
    if (!unchanged) return unchanged.error();
  }
  const auto source = read_gguf_header(*catalog.files.front());
  if (!source) return source.error();
  const size_t alignment = gguf_get_alignment(source->context.get());
  const GgufContextPtr context = empty_context(static_cast<uint32_t>(alignment));
  gguf_set_kv(context.get(), source->context.get());
  for (const char* key : {"split.no", "split.count", "split.tensors.count"}) gguf_remove_key(context.get(), key);
  if (edit) edit(context.get());
  for (const CatalogTensor& tensor : catalog.tensors) add_tensor(context.get(), tensor);

  MergedGguf merged{.header = meta_data(context.get()), .offsets = {}, .size_bytes = 0};
  merged.size_bytes = merged.header.size();
  for (size_t i = 0; i < catalog.tensors.size(); ++i) {
    merged.offsets.push_back(merged.header.size() + gguf_get_tensor_offset(context.get(), static_cast<int64_t>(i)));
    merged.size_bytes = align_up(merged.offsets.back() + catalog.tensors[i].range.bytes, alignment);
  }
  if (merged.size_bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return make_error(ErrorCode::kBadFile, "{}: the parts' tensors add up to more than 2^63 bytes",
                      catalog.files.front()->path());
  }
  return merged;
}

}  // namespace sluice
