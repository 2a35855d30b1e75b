// Small GGUF models for the store's tests: written through ggml's own writer with known bytes in every tensor, whole or
// split into parts. The crafted, broken ones are made of single fields (RawGguf).
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "ggml.h"
#include "gguf.h"
#include "store/gguf_header.h"

namespace sluice::test {

// A folder that is removed with everything in it.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = testing::TempDir() + "sluice-store-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::vector<uint8_t> read_bytes(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

inline void write_bytes(const std::string& path, const std::vector<uint8_t>& bytes) {
  // A new file each time: ext4 waits for the disk when one is cut and written again.
  std::filesystem::remove(path);
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

struct TestTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  std::vector<int64_t> ne;

  uint64_t bytes() const {
    uint64_t size = ggml_row_size(type, ne[0]);
    for (size_t i = 1; i < ne.size(); ++i) size *= static_cast<uint64_t>(ne[i]);
    return size;
  }
  // What stands in the file: a sequence that depends on the name, so that no two tensors are alike.
  std::vector<uint8_t> data() const {
    uint64_t state = std::hash<std::string>{}(name) | 1;
    std::vector<uint8_t> values(bytes());
    for (uint8_t& value : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<uint8_t>(state >> 56);
    }
    return values;
  }
};

struct TestModel {
  std::string architecture = "qwen3moe";
  uint32_t n_layer = 2;
  uint32_t n_expert = 4;
  uint32_t n_expert_used = 2;
  uint32_t alignment = GGUF_DEFAULT_ALIGNMENT;
  std::function<void(gguf_context*)> more_keys = [](gguf_context*) {};
  std::vector<TestTensor> tensors;

  void add(const std::string& name, ggml_type type, std::vector<int64_t> ne) {
    tensors.push_back({name, type, std::move(ne)});
  }
};

inline constexpr int64_t kHidden = 64;
inline constexpr int64_t kFf = 32;

inline std::string layer_tensor(uint32_t layer, const std::string& rest) {
  return "blk." + std::to_string(layer) + "." + rest;
}

inline void add_experts(TestModel& model, uint32_t layer, ggml_type gate = GGML_TYPE_Q4_0,
                        ggml_type up = GGML_TYPE_Q4_0, ggml_type down = GGML_TYPE_Q8_0) {
  model.add(layer_tensor(layer, "ffn_gate_exps.weight"), gate, {kHidden, kFf, model.n_expert});
  model.add(layer_tensor(layer, "ffn_up_exps.weight"), up, {kHidden, kFf, model.n_expert});
  model.add(layer_tensor(layer, "ffn_down_exps.weight"), down, {kFf, kHidden, model.n_expert});
}

inline void add_dense_ffn(TestModel& model, uint32_t layer) {
  model.add(layer_tensor(layer, "ffn_up.weight"), GGML_TYPE_Q4_0, {kHidden, 2 * kFf});
  model.add(layer_tensor(layer, "ffn_down.weight"), GGML_TYPE_Q4_0, {2 * kFf, kHidden});
}

// Embeddings, two layers of norm, router and separate experts.
inline TestModel plain_model() {
  TestModel model;
  model.add("token_embd.weight", GGML_TYPE_F16, {kHidden, 50});
  for (uint32_t layer = 0; layer < model.n_layer; ++layer) {
    model.add(layer_tensor(layer, "ffn_norm.weight"), GGML_TYPE_F32, {kHidden});
    model.add(layer_tensor(layer, "ffn_gate_inp.weight"), GGML_TYPE_F32, {kHidden, model.n_expert});
    add_experts(model, layer);
  }
  model.add("output_norm.weight", GGML_TYPE_F32, {kHidden - 1});
  return model;
}

inline GgufContextPtr context_with_alignment(uint32_t alignment) {
  GgufContextPtr context(gguf_init_empty());
  if (alignment == GGUF_DEFAULT_ALIGNMENT) return context;
  gguf_set_val_u32(context.get(), "general.alignment", alignment);
  std::vector<uint8_t> header(gguf_get_meta_size(context.get()));
  gguf_get_meta_data(context.get(), header.data());
  return GgufContextPtr(gguf_init_from_buffer(header.data(), header.size(), {true, nullptr}));
}

inline void set_model_keys(gguf_context* context, const TestModel& model) {
  const std::string& architecture = model.architecture;
  gguf_set_val_str(context, "general.architecture", architecture.c_str());
  gguf_set_val_str(context, "general.name", "Test Model");
  gguf_set_val_u32(context, (architecture + ".block_count").c_str(), model.n_layer);
  if (model.n_expert > 0) {
    gguf_set_val_u32(context, (architecture + ".expert_count").c_str(), model.n_expert);
    gguf_set_val_u32(context, (architecture + ".expert_used_count").c_str(), model.n_expert_used);
  }
  model.more_keys(context);
}

inline void write_tensors(GgufContextPtr context, const std::vector<TestTensor>& tensors, const std::string& path) {
  std::vector<std::vector<uint8_t>> contents;
  for (const TestTensor& source : tensors) {
    contents.push_back(source.data());
    ggml_tensor tensor{};
    tensor.type = source.type;
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) tensor.ne[i] = i < source.ne.size() ? source.ne[i] : 1;
    tensor.nb[0] = ggml_type_size(source.type);
    tensor.nb[1] = ggml_row_size(source.type, tensor.ne[0]);
    for (size_t i = 2; i < GGML_MAX_DIMS; ++i) tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(tensor.ne[i - 1]);
    ggml_set_name(&tensor, source.name.c_str());
    gguf_add_tensor(context.get(), &tensor);
    gguf_set_tensor_data(context.get(), source.name.c_str(), contents.back().data());
  }
  ASSERT_TRUE(gguf_write_to_file(context.get(), path.c_str(), /*only_meta=*/false));
}

inline void write_model(const TestModel& model, const std::string& path) {
  GgufContextPtr context = context_with_alignment(model.alignment);
  set_model_keys(context.get(), model);
  write_tensors(std::move(context), model.tensors, path);
}

inline std::string part_path(const std::string& prefix, uint32_t number, uint32_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, number, count);
}

// Part `number`, from 1, with tensors [first, last) of the model. As llama-gguf-split writes it: the model's keys stand
// in part 1, the others have the split's keys alone.
inline void write_part(const TestModel& model, const std::string& path, uint32_t number, uint32_t count, size_t first,
                       size_t last) {
  GgufContextPtr context = context_with_alignment(model.alignment);
  if (number == 1) set_model_keys(context.get(), model);
  gguf_set_val_u16(context.get(), "split.no", static_cast<uint16_t>(number - 1));
  gguf_set_val_u16(context.get(), "split.count", static_cast<uint16_t>(count));
  gguf_set_val_i32(context.get(), "split.tensors.count", static_cast<int32_t>(model.tensors.size()));
  const auto begin = model.tensors.begin();
  const std::vector<TestTensor> tensors(begin + static_cast<ptrdiff_t>(first), begin + static_cast<ptrdiff_t>(last));
  write_tensors(std::move(context), tensors, path);
}

// Tensors are dealt out as evenly as they come; with more parts than tensors some parts have none.
inline void write_split_model(const TestModel& model, const std::string& prefix, uint32_t count) {
  const size_t n_tensors = model.tensors.size();
  for (uint32_t i = 0; i < count; ++i) {
    write_part(model, part_path(prefix, i + 1, count), i + 1, count, n_tensors * i / count,
               n_tensors * (i + 1) / count);
  }
}

// A GGUF put together field by field, whatever they say.
class RawGguf {
 public:
  template <typename T>
  RawGguf& value(T number) {
    const auto* begin = reinterpret_cast<const uint8_t*>(&number);
    bytes_.insert(bytes_.end(), begin, begin + sizeof(T));
    return *this;
  }
  RawGguf& raw(const std::string& text) {
    bytes_.insert(bytes_.end(), text.begin(), text.end());
    return *this;
  }
  RawGguf& text(const std::string& content) { return value<uint64_t>(content.size()).raw(content); }
  RawGguf& preamble(uint64_t n_tensors, uint64_t n_keys, uint32_t version = 3) {
    return raw("GGUF").value(version).value(n_tensors).value(n_keys);
  }
  RawGguf& key_text(const std::string& key, const std::string& content) {
    return text(key).value<int32_t>(GGUF_TYPE_STRING).text(content);
  }
  RawGguf& key_u32(const std::string& key, uint32_t number) {
    return text(key).value<int32_t>(GGUF_TYPE_UINT32).value(number);
  }
  RawGguf& tensor(const std::string& name, const std::vector<int64_t>& ne, int32_t type, uint64_t offset) {
    text(name).value(static_cast<uint32_t>(ne.size()));
    for (const int64_t n : ne) value(n);
    return value(type).value(offset);
  }
  RawGguf& zeros(size_t count) {
    bytes_.insert(bytes_.end(), count, uint8_t{0});
    return *this;
  }
  RawGguf& pad(size_t alignment) { return zeros((alignment - bytes_.size() % alignment) % alignment); }

  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// While it lives, a line that ggml logs is a failed test: what our checks let pass, ggml's reader must accept.
class NoGgmlLog {
 public:
  NoGgmlLog() {
    ggml_log_get(&callback_, &user_data_);
    ggml_log_set([](ggml_log_level, const char* text, void*) { ADD_FAILURE() << "ggml says: " << text; }, nullptr);
  }
  ~NoGgmlLog() { ggml_log_set(callback_, user_data_); }
  NoGgmlLog(const NoGgmlLog&) = delete;
  NoGgmlLog& operator=(const NoGgmlLog&) = delete;

 private:
  ggml_log_callback callback_ = nullptr;
  void* user_data_ = nullptr;
};

}  // namespace sluice::test
