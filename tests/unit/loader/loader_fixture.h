// A made-up model on disk for loader tests: a file of experts whose every byte is known.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "io/device.h"
#include "loader/loader.h"
#include "store/pack_format.h"

namespace sluice {

struct TestModel {
  std::string path;
  std::vector<LayerSource> sources;
  std::vector<uint8_t> bytes;  // of the whole file

  ~TestModel() { std::filesystem::remove(path); }

  std::vector<uint8_t> slab(size_t source, size_t matrix, uint32_t expert) const {
    const MatrixSource& m = sources[source].matrices[matrix];
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(sources[source].slab_offset(m, expert));
    return {begin, begin + static_cast<std::ptrdiff_t>(m.slab_bytes)};
  }
};

// Random bytes into the file, which the sources are then read from.
inline void fill_and_open(TestModel& model, int fd, uint64_t size, DirectMode mode) {
  model.bytes.resize(size);
  uint64_t state = 88172645463325252ull;
  for (uint8_t& byte : model.bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<uint8_t>(state >> 32);
  }
  std::FILE* file = fdopen(fd, "wb");
  EXPECT_EQ(std::fwrite(model.bytes.data(), 1, size, file), size);
  std::fclose(file);
  auto opened = File::open(model.path, mode);
  EXPECT_TRUE(opened.ok()) << opened.error().message();
  for (LayerSource& source : model.sources) {
    for (SpanSource& span : source.spans) span.file = *opened;
  }
}

// `slab_bytes`: of gate and up, by layer; down is a third larger. Tensors start at multiples of 32, as in a GGUF.
inline std::unique_ptr<TestModel> make_test_model(const std::vector<uint64_t>& slab_bytes, uint32_t n_expert, DirectMode mode,
                                                  uint32_t first_layer = 1) {
  auto model = std::make_unique<TestModel>();
  std::string path = (std::filesystem::temp_directory_path() / "sluice-loader-XXXXXX").string();
  const int fd = mkstemp(path.data());
  EXPECT_GE(fd, 0);
  model->path = path;
  uint64_t size = 1000;
  for (uint32_t layer = 0; layer < slab_bytes.size(); ++layer) {
    LayerSource source{.layer = first_layer + 2 * layer, .n_expert = n_expert, .spans = {}, .matrices = {}};  // not every layer has experts
    for (const MatrixRole role : {MatrixRole::kGate, MatrixRole::kUp, MatrixRole::kDown}) {
      const uint64_t bytes = role == MatrixRole::kDown ? slab_bytes[layer] * 4 / 3 : slab_bytes[layer];
      size = align_up(size, 32);
      source.add_matrix(role, nullptr, size, bytes);
      size += bytes * n_expert;
    }
    model->sources.push_back(source);
  }
  fill_and_open(*model, fd, size, mode);
  return model;
}

// The same as a pack has it: each expert a record of one span, at a multiple of 4096, and a checksum for each slab.
inline std::unique_ptr<TestModel> make_pack_like_model(const std::vector<uint64_t>& slab_bytes, uint32_t n_expert, DirectMode mode) {
  auto model = std::make_unique<TestModel>();
  std::string path = (std::filesystem::temp_directory_path() / "sluice-loader-XXXXXX").string();
  const int fd = mkstemp(path.data());
  EXPECT_GE(fd, 0);
  model->path = path;
  uint64_t size = kPackAlignBytes;
  for (uint32_t layer = 0; layer < slab_bytes.size(); ++layer) {
    LayerSource source{.layer = 1 + 2 * layer, .n_expert = n_expert, .spans = {}, .matrices = {}};
    uint64_t end = 0;
    for (const MatrixRole role : {MatrixRole::kGate, MatrixRole::kUp, MatrixRole::kDown}) {
      const uint64_t bytes = role == MatrixRole::kDown ? slab_bytes[layer] * 4 / 3 : slab_bytes[layer];
      const uint64_t offset = align_up(end, kPackSegmentAlignBytes);
      source.matrices.push_back({.role = role, .span = 0, .offset = offset, .slab_bytes = bytes});
      end = offset + bytes;
    }
    const uint64_t stride_bytes = align_up(end, kPackAlignBytes);
    source.spans.push_back({.file = nullptr, .offset = size, .stride_bytes = stride_bytes, .bytes = end});
    size += stride_bytes * n_expert;
    model->sources.push_back(source);
  }
  fill_and_open(*model, fd, size, mode);
  for (size_t i = 0; i < model->sources.size(); ++i) {
    LayerSource& source = model->sources[i];
    auto checksums = std::make_shared<std::vector<uint64_t>>();
    for (uint32_t expert = 0; expert < n_expert; ++expert) {
      for (size_t m = 0; m < source.matrices.size(); ++m) {
        const auto slab = model->slab(i, m, expert);
        checksums->push_back(pack_checksum(reinterpret_cast<const std::byte*>(slab.data()), slab.size()));
      }
    }
    source.checksums = checksums;
  }
  return model;
}

}  // namespace sluice
