// Damage is named by tensor, expert and place, and what is sound is not called damaged.
#include "store/verify.h"

#include <cstring>

#include "unit/store/pack_fixture.h"

namespace sluice::test {
namespace {

VerifyReport verify(const std::string& path) {
  MemoryDevice device;
  auto report = verify_model(open_catalog(path), device, {});
  SLUICE_ASSERT(report.ok(), "{}", report.error().message());
  return std::move(*report);
}

std::vector<uint8_t> bytes_of(uint64_t bytes, uint8_t value) {
  return std::vector<uint8_t>(bytes, value);
}

void overwrite(const std::string& path, uint64_t offset, const std::vector<uint8_t>& bytes) {
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

class VerifyPack : public testing::Test {
 protected:
  VerifyPack() {
    TestModel model = plain_model();
    add_side_tensors(model, 1);
    write_model(model, folder_.file("model.gguf"));
    SLUICE_ASSERT(pack(folder_.file("model.gguf"), folder_.file("pack")).ok(), "no pack");
  }
  std::string path(const char* name) const { return folder_.file("pack") + "/" + name; }

  TempFolder folder_;
};

TEST_F(VerifyPack, ASoundOneIsSound) {
  const Catalog catalog = open_catalog(folder_.file("pack"));
  const VerifyReport report = verify(folder_.file("pack"));
  EXPECT_TRUE(report.damages.empty());
  EXPECT_TRUE(report.checksums);
  EXPECT_EQ(report.n_tensor, catalog.tensors.size());
  EXPECT_EQ(report.n_slab, 2u * 3 * 4);
  // Biases and scales are read twice: where they are resident, and in the records.
  EXPECT_GT(report.bytes, catalog.expert_bytes + catalog.dense_bytes);
}

TEST_F(VerifyPack, EveryDamagedSegmentIsNamed) {
  const Catalog catalog = open_catalog(folder_.file("pack"));
  for (const PackLayer& layer : catalog.pack->layers) {
    for (const PackSegment& segment : layer.segments) {
      for (const uint64_t inside : {uint64_t{0}, segment.bytes / 2, segment.bytes - 1}) {
        const uint64_t offset = layer.record_offset + 2 * layer.record_stride_bytes + segment.offset;
        flip_byte(path(kPackExpertsName), offset + inside);
        const VerifyReport report = verify(folder_.file("pack"));
        ASSERT_EQ(report.damages.size(), 1u) << segment.name;
        EXPECT_EQ(report.damages[0].tensor, segment.name);
        EXPECT_EQ(report.damages[0].expert, 2);
        EXPECT_EQ(report.damages[0].offset, offset);
        EXPECT_EQ(report.damages[0].message(),
                  fmt::format("{} expert 2: differs from its checksum ({} bytes at {} of {})", segment.name,
                              segment.bytes, offset, path(kPackExpertsName)));
        flip_byte(path(kPackExpertsName), offset + inside);
      }
    }
  }
}

TEST_F(VerifyPack, EveryDamagedDenseTensorAndTheMetadataAreNamed) {
  const Catalog catalog = open_catalog(folder_.file("pack"));
  for (const CatalogTensor& tensor : catalog.tensors) {
    if (parse_expert_tensor_name(tensor.name)) continue;
    flip_byte(path(kPackModelName), tensor.range.offset + tensor.range.bytes - 1);
    const VerifyReport report = verify(folder_.file("pack"));
    ASSERT_EQ(report.damages.size(), 1u) << tensor.name;
    EXPECT_EQ(report.damages[0].tensor, tensor.name);
    EXPECT_EQ(report.damages[0].expert, -1);
    EXPECT_EQ(report.damages[0].offset, tensor.range.offset);
    flip_byte(path(kPackModelName), tensor.range.offset + tensor.range.bytes - 1);
  }
  const std::vector<uint8_t> model = read_bytes(path(kPackModelName));
  const std::string name = "Test Model";
  const auto at = std::search(model.begin(), model.end(), name.begin(), name.end()) - model.begin();
  flip_byte(path(kPackModelName), static_cast<uint64_t>(at));
  const VerifyReport report = verify(folder_.file("pack"));
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].tensor, "metadata");
}

TEST_F(VerifyPack, ItStopsWhenItIsTold) {
  MemoryDevice device;
  const Catalog catalog = open_catalog(folder_.file("pack"));
  int calls = 0;
  const auto report = verify_model(catalog, device, [&](const char*, uint64_t, uint64_t) { return ++calls < 5; });
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().code, ErrorCode::kCancelled);
  EXPECT_EQ(calls, 5);
}

// Matrices of 256 KiB, large enough for holes inside; every byte is part of a number.
class VerifyGguf : public testing::Test {
 protected:
  VerifyGguf() {
    TestModel model;
    model.n_layer = 1;
    model.add("token_embd.weight", GGML_TYPE_F16, {kHidden, 16});
    model.add(layer_tensor(0, "ffn_up_exps.weight"), GGML_TYPE_F32, {256, 256, model.n_expert});
    model.add(layer_tensor(0, "ffn_down_exps.weight"), GGML_TYPE_F16, {256, 256, model.n_expert});
    write_model(model, path_);
    const Catalog catalog = open_catalog(path_);
    for (const CatalogTensor& tensor : catalog.tensors)
      overwrite(path_, tensor.range.offset, bytes_of(tensor.range.bytes, 0x11));
  }
  FileRange slab(size_t matrix, uint32_t expert) const {
    const Catalog catalog = open_catalog(path_);
    const ExpertLayer& layer = catalog.expert_layers[0];
    return layer.slab_range(layer.matrices[matrix], expert);
  }

  TempFolder folder_;
  const std::string path_ = folder_.file("model.gguf");
};

TEST_F(VerifyGguf, ASoundOneIsSound) {
  const VerifyReport report = verify(path_);
  EXPECT_TRUE(report.damages.empty());
  EXPECT_TRUE(report.padded.empty());
  EXPECT_FALSE(report.checksums);
  EXPECT_EQ(report.n_slab, 8u);
  const Catalog catalog = open_catalog(path_);
  EXPECT_EQ(report.bytes, catalog.expert_bytes + catalog.dense_bytes);
}

TEST_F(VerifyGguf, ValuesThatAreNoNumbersAreNamed) {
  const FileRange expert = slab(0, 1);
  overwrite(path_, expert.offset + 400, bytes_of(4, 0xff));
  const VerifyReport report = verify(path_);
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].tensor, "blk.0.ffn_up_exps.weight");
  EXPECT_EQ(report.damages[0].expert, 1);
  EXPECT_NE(report.damages[0].what.find("no numbers"), std::string::npos);
}

TEST_F(VerifyGguf, AnExpertOfZerosIsNamed) {
  const FileRange expert = slab(1, 3);
  overwrite(path_, expert.offset, bytes_of(expert.bytes, 0));
  const VerifyReport report = verify(path_);
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].message(),
            fmt::format("blk.0.ffn_down_exps.weight expert 3: is all zeros ({} bytes at {} of {})", expert.bytes,
                        expert.offset, path_));
  // All of them: a tensor that was never written.
  for (uint32_t e = 0; e < 4; ++e) overwrite(path_, slab(1, e).offset, bytes_of(expert.bytes, 0));
  EXPECT_EQ(verify(path_).damages.size(), 4u);
}

TEST_F(VerifyGguf, AHoleInsideAnExpertIsNamed) {
  const FileRange expert = slab(0, 2);
  overwrite(path_, expert.offset + 64 * 1024, bytes_of(128 * 1024, 0));
  const VerifyReport report = verify(path_);
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].expert, 2);
  EXPECT_EQ(report.damages[0].offset, expert.offset + 64 * 1024);
  EXPECT_EQ(report.damages[0].bytes, 128u * 1024);
}

TEST_F(VerifyGguf, AFewZerosAreNone) {
  overwrite(path_, slab(0, 2).offset, bytes_of(kZeroRunBytesMin - 64, 0));
  EXPECT_TRUE(verify(path_).damages.empty());
}

TEST_F(VerifyGguf, PaddingIsNoDamageAndHidesNone) {
  const uint64_t begin = 96 * 1024;
  for (uint32_t e = 0; e < 4; ++e) overwrite(path_, slab(0, e).offset + begin, bytes_of(slab(0, e).bytes - begin, 0));
  const VerifyReport padded = verify(path_);
  EXPECT_TRUE(padded.damages.empty()) << padded.damages[0].message();
  EXPECT_EQ(padded.padded, std::vector<std::string>{"blk.0.ffn_up_exps.weight"});

  overwrite(path_, slab(0, 1).offset, bytes_of(slab(0, 1).bytes, 0));
  const VerifyReport damaged = verify(path_);
  ASSERT_EQ(damaged.damages.size(), 1u);
  EXPECT_EQ(damaged.damages[0].expert, 1);
  EXPECT_EQ(damaged.damages[0].what, "is all zeros");
}

}  // namespace
}  // namespace sluice::test
