// Packs for the store's tests: made from the small models of gguf_fixture.h, and their files' bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/memory_device.h"
#include "store/catalog.h"
#include "store/pack_writer.h"
#include "unit/store/gguf_fixture.h"

namespace sluice::test {

inline Catalog open_catalog(const std::string& path) {
  auto catalog = Catalog::open(path, DirectMode::kOff);
  SLUICE_ASSERT(catalog.ok(), "{}", catalog.error().message());
  return std::move(*catalog);
}

inline Result<PackReport> pack(const Catalog& catalog, const std::string& folder, const PackOptions& options = {}) {
  MemoryDevice device;
  return write_pack(catalog, device, folder, options);
}

inline Result<PackReport> pack(const std::string& path, const std::string& folder, const PackOptions& options = {}) {
  return pack(open_catalog(path), folder, options);
}

inline std::vector<uint8_t> range_bytes(const Catalog& catalog, const FileRange& range) {
  std::vector<uint8_t> bytes(range.bytes);
  const Status status = catalog.files[range.file]->read_exactly(range.offset, bytes.data(), range.bytes);
  EXPECT_TRUE(status.ok());
  return bytes;
}

// Changes one byte in place.
inline void flip_byte(const std::string& path, uint64_t offset) {
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekg(static_cast<std::streamoff>(offset));
  const char byte = static_cast<char>(stream.get());
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.put(static_cast<char>(byte ^ 0x20));
}

// Experts' biases, scales and input scales, as llama.cpp names them.
inline void add_side_tensors(TestModel& model, uint32_t layer) {
  model.add(layer_tensor(layer, "ffn_up_exps.bias"), GGML_TYPE_F32, {kFf, model.n_expert});
  model.add(layer_tensor(layer, "ffn_down_exps.bias"), GGML_TYPE_F32, {kHidden, model.n_expert});
  model.add(layer_tensor(layer, "ffn_gate_exps.scale"), GGML_TYPE_F32, {model.n_expert});
  model.add(layer_tensor(layer, "ffn_down_exps.input_scale"), GGML_TYPE_F32, {1});  // one for all experts
}

}  // namespace sluice::test
