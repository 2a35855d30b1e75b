// Packs hold the model's very bytes, in the same bytes every time, and appear whole or not at all.
#include "store/pack_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "unit/store/pack_fixture.h"

namespace sluice::test {
namespace {

using Names = std::vector<std::string>;

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TestModel fused_model() {
  TestModel model;
  model.add("token_embd.weight", GGML_TYPE_F16, {kHidden, 50});
  model.add(layer_tensor(1, "ffn_gate_up_exps.weight"), GGML_TYPE_Q4_0, {kHidden, 2 * kFf, model.n_expert});
  model.add(layer_tensor(1, "ffn_down_exps.weight"), GGML_TYPE_Q4_0, {kFf, kHidden, model.n_expert});
  return model;
}

TestModel mixed_model() {
  TestModel model;
  model.n_layer = 3;
  model.alignment = 64;
  model.add("token_embd.weight", GGML_TYPE_Q8_0, {kHidden, 50});
  add_dense_ffn(model, 0);
  add_experts(model, 1, GGML_TYPE_F16, GGML_TYPE_Q5_1, GGML_TYPE_MXFP4);
  add_side_tensors(model, 1);
  add_experts(model, 2, GGML_TYPE_NVFP4, GGML_TYPE_BF16, GGML_TYPE_F32);
  model.add("output_norm.weight", GGML_TYPE_F32, {kHidden - 1});
  return model;
}

class PackWriterTest : public testing::Test {
 protected:
  // A model on disk and its catalog.
  Catalog make(const TestModel& model, uint32_t n_part = 1) {
    if (n_part > 1) {
      write_split_model(model, folder_.file("model"), n_part);
      return open_catalog(part_path(folder_.file("model"), 2, n_part));
    }
    write_model(model, folder_.file("model.gguf"));
    return open_catalog(folder_.file("model.gguf"));
  }
  std::string target() const { return folder_.file("out"); }
  void expect_refused(const Result<PackReport>& report, const std::string& word) const {
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.error().code, ErrorCode::kBadArgument);
    const std::string text = report.error().message();
    EXPECT_NE(text.find(word), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_FALSE(std::filesystem::exists(target() + ".partial"));
  }

  TempFolder folder_;
};

// Every tensor of the source is in the pack, with its bytes; records are whole and aligned.
void expect_same_model(const Catalog& source, const Catalog& packed) {
  ASSERT_TRUE(packed.pack);
  ASSERT_EQ(packed.tensors.size(), source.tensors.size());
  EXPECT_EQ(packed.files.size(), 2u);
  EXPECT_EQ(packed.expert_bytes, source.expert_bytes);
  EXPECT_EQ(packed.dense_bytes, source.dense_bytes);
  std::set<std::string> sliced;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const CatalogTensor& tensor = source.tensors[i];
    EXPECT_EQ(packed.tensors[i].name, tensor.name);
    EXPECT_EQ(packed.tensors[i].type, tensor.type);
    if (parse_expert_tensor_name(tensor.name)) continue;
    EXPECT_EQ(range_bytes(packed, packed.tensors[i].range), range_bytes(source, tensor.range)) << tensor.name;
  }
  ASSERT_EQ(packed.expert_layers.size(), source.expert_layers.size());
  for (size_t l = 0; l < source.expert_layers.size(); ++l) {
    const ExpertLayer& layer = source.expert_layers[l];
    const ExpertLayer& given = packed.expert_layers[l];
    EXPECT_EQ(given.spans.size(), 1u) << "one read for all matrices";
    EXPECT_EQ(given.spans[0].offset % kPackAlignBytes, 0u);
    EXPECT_EQ(given.spans[0].stride_bytes % kPackAlignBytes, 0u);
    EXPECT_EQ(given.side_tensors, layer.side_tensors);
    ASSERT_EQ(given.matrices.size(), layer.matrices.size());
    for (size_t m = 0; m < layer.matrices.size(); ++m) {
      EXPECT_EQ(given.matrices[m].shape, layer.matrices[m].shape);
      EXPECT_EQ(given.matrices[m].offset % kPackSegmentAlignBytes, 0u);
      std::vector<uint8_t> bytes(layer.matrices[m].shape.total_bytes());
      std::vector<uint8_t> wanted(bytes.size());
      ASSERT_TRUE(packed.read_experts(given, given.matrices[m], 0, bytes.data(), bytes.size()).ok());
      ASSERT_TRUE(source.read_experts(layer, layer.matrices[m], 0, wanted.data(), wanted.size()).ok());
      EXPECT_EQ(bytes, wanted) << "layer " << layer.layer << " matrix " << m;
    }
    // The slices of the side tensors.
    const PackLayer& record = packed.pack->layers[l];
    for (size_t s = record.n_matrix; s < record.segments.size(); ++s) {
      const PackSegment& segment = record.segments[s];
      sliced.insert(segment.name);
      const auto tensor = std::find_if(source.tensors.begin(), source.tensors.end(),
                                       [&](const auto& t) { return t.name == segment.name; });
      ASSERT_NE(tensor, source.tensors.end());
      const std::vector<uint8_t> whole = range_bytes(source, tensor->range);
      ASSERT_EQ(whole.size(), segment.bytes * record.n_expert);
      for (uint32_t expert = 0; expert < record.n_expert; ++expert) {
        const std::vector<uint8_t> slice = range_bytes(
            packed, {1, record.record_offset + expert * record.record_stride_bytes + segment.offset, segment.bytes});
        EXPECT_TRUE(
            std::equal(slice.begin(), slice.end(), whole.begin() + static_cast<ptrdiff_t>(expert * segment.bytes)))
            << segment.name;
      }
    }
    for (const std::string& name : layer.side_tensors)
      EXPECT_EQ(sliced.contains(name), !name.ends_with("input_scale")) << name;
  }
}

TEST_F(PackWriterTest, HoldsTheBytesOfEveryKindOfModel) {
  for (const auto& [model, n_part] : {std::pair(plain_model(), 1u),
                                      {plain_model(), 3u},
                                      {fused_model(), 1u},
                                      {mixed_model(), 1u},
                                      {mixed_model(), 5u}}) {
    std::filesystem::remove_all(target());
    const Catalog source = make(model, n_part);
    const auto report = pack(source, target());
    ASSERT_TRUE(report.ok()) << report.error().message();
    const Catalog packed = open_catalog(target());
    EXPECT_EQ(packed.pack->id.text(), report->id.text());
    EXPECT_EQ(names_in(target()), (Names{kPackExpertsName, kPackModelName}));
    EXPECT_EQ(std::filesystem::file_size(target() + "/" + kPackExpertsName), report->experts_file_bytes);
    expect_same_model(source, packed);
    expect_same_model(source, open_catalog(target() + "/" + kPackModelName));
  }
}

TEST_F(PackWriterTest, TheSameModelGivesTheSameBytes) {
  const Catalog source = make(mixed_model());
  ASSERT_TRUE(pack(source, target()).ok());
  ASSERT_TRUE(pack(source, folder_.file("again")).ok());
  // A raw pack is a source too, and as good as the model that it was made from.
  ASSERT_TRUE(pack(target(), folder_.file("from-pack")).ok());
  for (const char* name : {kPackModelName, kPackExpertsName}) {
    const std::vector<uint8_t> bytes = read_bytes(target() + "/" + name);
    EXPECT_EQ(read_bytes(folder_.file("again") + "/" + name), bytes) << name;
    EXPECT_EQ(read_bytes(folder_.file("from-pack") + "/" + name), bytes) << name;
  }
}

TEST_F(PackWriterTest, ANewRunReplacesAPackOfTheModelAlone) {
  const Catalog source = make(plain_model());
  const auto first = pack(source, target());
  ASSERT_TRUE(first.ok());
  flip_byte(target() + "/" + kPackExpertsName, first->experts_file_bytes - 5000);
  const auto second = pack(source, target() + "/");  // as a shell completes it
  ASSERT_TRUE(second.ok()) << second.error().message();
  EXPECT_EQ(second->id, first->id);
  EXPECT_EQ(names_in(folder_.path()), (Names{"model.gguf", "out"}));
  expect_same_model(source, open_catalog(target()));
  // On itself.
  ASSERT_TRUE(pack(target(), target()).ok());
  expect_same_model(source, open_catalog(target()));

  const std::vector<uint8_t> kept = read_bytes(target() + "/" + kPackExpertsName);
  TestModel other = plain_model();
  other.add("another.weight", GGML_TYPE_F32, {8});
  expect_refused(pack(make(other), target()), "a pack of another model");
  EXPECT_EQ(read_bytes(target() + "/" + kPackExpertsName), kept);
  std::ofstream(target() + "/notes.txt") << "mine";
  write_model(plain_model(), folder_.file("model.gguf"));
  expect_refused(pack(folder_.file("model.gguf"), target()), "notes.txt");
  EXPECT_EQ(names_in(target()), (Names{kPackExpertsName, kPackModelName, "notes.txt"}));
}

TEST_F(PackWriterTest, WhatIsNoPackIsNotReplaced) {
  const Catalog source = make(plain_model());
  std::filesystem::create_directory(target());
  ASSERT_TRUE(pack(source, target()).ok()) << "an empty folder is as good as none";
  std::filesystem::remove_all(target());

  std::filesystem::create_directory(target());
  std::ofstream(target() + "/thesis.txt") << "years of work";
  expect_refused(pack(source, target()), "something else than a pack");
  EXPECT_EQ(names_in(target()), Names{"thesis.txt"});
  std::filesystem::remove_all(target());

  std::filesystem::create_directory(target());
  std::ofstream(target() + "/" + kPackExpertsName) << "no pack at all";
  expect_refused(pack(source, target()), "cannot read as a pack");
  std::filesystem::remove_all(target());

  std::ofstream(target()) << "a file";
  expect_refused(pack(source, target()), "is no folder");
  expect_refused(pack(source, target() + "/deeper"), "cannot");
  std::filesystem::remove(target());
  std::filesystem::create_symlink(folder_.file("elsewhere"), target());
  expect_refused(pack(source, target()), "is no folder");
  std::filesystem::remove(target());
  expect_refused(pack(source, folder_.file("nowhere/out")), "nowhere");
  EXPECT_EQ(names_in(folder_.path()), Names{"model.gguf"});

  TestModel dense;
  dense.n_expert = 0;
  add_dense_ffn(dense, 0);
  expect_refused(pack(make(dense), target()), "no experts to pack");
}

TEST_F(PackWriterTest, StoppedAnywhereItLeavesNothingBehind) {
  const Catalog source = make(mixed_model());
  int n_call = 0;
  ASSERT_TRUE(pack(source, target(),
                   {.on_progress =
                        [&](const char*, uint64_t done, uint64_t total) {
                          EXPECT_LE(done, total);
                          ++n_call;
                          return true;
                        }})
                  .ok());
  ASSERT_GT(n_call, 10);
  const std::vector<uint8_t> kept = read_bytes(target() + "/" + kPackExpertsName);
  for (const bool replacing : {true, false}) {
    if (!replacing) std::filesystem::remove_all(target());
    for (int stop = 0; stop < n_call; ++stop) {
      int call = 0;
      const auto report =
          pack(source, target(), {.on_progress = [&](const char*, uint64_t, uint64_t) { return call++ != stop; }});
      ASSERT_FALSE(report.ok());
      ASSERT_EQ(report.error().code, ErrorCode::kCancelled);
      ASSERT_EQ(names_in(folder_.path()), replacing ? (Names{"model.gguf", "out"}) : (Names{"model.gguf"}));
    }
    if (replacing) {
      EXPECT_EQ(read_bytes(target() + "/" + kPackExpertsName), kept);
    }
  }
}

TEST_F(PackWriterTest, ASourceThatChangesMeanwhileIsNoticed) {
  const Catalog source = make(plain_model());
  bool changed = false;
  const auto report = pack(source, target(), {.on_progress = [&](const char*, uint64_t, uint64_t) {
                             if (!std::exchange(changed, true))
                               std::ofstream(folder_.file("model.gguf"), std::ios::app) << "more";
                             return true;
                           }});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().code, ErrorCode::kChanged);
  EXPECT_EQ(names_in(folder_.path()), Names{"model.gguf"});
}

TEST_F(PackWriterTest, ASourceThatIsCutIsRefusedWithoutATrace) {
  TestModel model = plain_model();
  model.add("last.weight", GGML_TYPE_F32, {8});  // ends where the file does
  const Catalog whole = make(model);
  const uint64_t bytes = std::filesystem::file_size(folder_.file("model.gguf"));
  const FileRange expert = whole.expert_layers[0].slab_range(whole.expert_layers[0].matrices[1], 2);
  for (const uint64_t cut : {bytes - 1, expert.offset + expert.bytes / 2}) {
    std::filesystem::resize_file(folder_.file("model.gguf"), cut);
    const auto catalog = Catalog::open(folder_.file("model.gguf"), DirectMode::kOff);
    ASSERT_FALSE(catalog.ok());
    // Cut only after it was opened: by whoever is still downloading it.
    const auto report = pack(whole, target());
    ASSERT_FALSE(report.ok());
    EXPECT_TRUE(report.error().code == ErrorCode::kChanged || report.error().code == ErrorCode::kShortRead);
    EXPECT_EQ(names_in(folder_.path()), Names{"model.gguf"});
  }
}

TEST_F(PackWriterTest, WhatAKilledRunLeftIsReplaced) {
  const Catalog source = make(plain_model());
  ASSERT_TRUE(pack(source, folder_.file("fresh")).ok());
  std::filesystem::create_directory(target() + ".partial");
  std::ofstream(target() + ".partial/" + kPackExpertsName) << std::string(1 << 20, 'x');
  std::ofstream(target() + ".partial/" + kPackModelName) << std::string(1 << 20, 'y');
  ASSERT_TRUE(pack(source, target()).ok());
  for (const char* name : {kPackModelName, kPackExpertsName}) {
    EXPECT_EQ(read_bytes(target() + "/" + name), read_bytes(folder_.file("fresh") + "/" + name)) << name;
  }
  EXPECT_EQ(names_in(folder_.path()), (Names{"fresh", "model.gguf", "out"}));

  // Somebody's folder that only happens to have the name.
  std::filesystem::create_directory(target() + ".partial");
  std::ofstream(target() + ".partial/thesis.txt") << "years of work";
  const auto report = pack(source, target());
  ASSERT_FALSE(report.ok());
  EXPECT_NE(report.error().message().find("thesis.txt"), std::string::npos);
  EXPECT_EQ(names_in(target() + ".partial"), Names{"thesis.txt"});
}

TEST_F(PackWriterTest, TwoCannotWriteOnePack) {
  const Catalog source = make(plain_model());
  // A second writer, while the first is at work.
  bool tried = false;
  const auto report =
      pack(source, target(), {.on_progress = [&](const char*, uint64_t, uint64_t) {
             if (std::exchange(tried, true)) return true;
             const auto second = pack(source, target());
             EXPECT_FALSE(second.ok());
             EXPECT_NE(second.error().message().find("is being written by another process"), std::string::npos);
             return true;
           }});
  ASSERT_TRUE(report.ok()) << report.error().message();
  EXPECT_TRUE(tried);
  expect_same_model(source, open_catalog(target()));
}

TEST_F(PackWriterTest, ExpertsAreHolesInTheModelFile) {
  TestModel model;
  model.n_layer = 1;
  model.add("token_embd.weight", GGML_TYPE_F32, {kHidden, 16});
  model.add(layer_tensor(0, "ffn_up_exps.weight"), GGML_TYPE_F32, {512, 512, model.n_expert});
  model.add(layer_tensor(0, "ffn_down_exps.weight"), GGML_TYPE_F32, {512, 512, model.n_expert});
  const auto report = pack(make(model), target());
  ASSERT_TRUE(report.ok());
  struct stat info = {};
  ASSERT_EQ(stat((target() + "/" + kPackModelName).c_str(), &info), 0);
  EXPECT_GT(info.st_size, 8 << 20);
  EXPECT_LT(info.st_blocks * 512, 1 << 20);
}

// Rearranges by turning every bit; whole matrices only.
class Inverting : public SlabTransform {
 public:
  std::string tag() const override { return "inverted"; }
  bool applies(const ExpertTensorShape& shape) const override { return shape.type == GGML_TYPE_Q4_0; }
  Status apply(const ExpertTensorShape& shape, const std::byte* from, std::byte* to) const override {
    std::transform(from, from + shape.slab_bytes, to, [](std::byte byte) { return ~byte; });
    return {};
  }
};

TEST_F(PackWriterTest, ATransformIsAppliedWhereItAppliesAndMarked) {
  const Inverting inverting;
  const Catalog source = make(plain_model());
  const auto report = pack(source, target(), {.transform = &inverting});
  ASSERT_TRUE(report.ok()) << report.error().message();
  EXPECT_EQ(report->n_native, 4u);  // gate and up of two layers
  const Catalog packed = open_catalog(target());
  EXPECT_EQ(packed.pack->layout, PackLayout::kNative);
  EXPECT_EQ(packed.pack->native_tag, "inverted");
  for (size_t m = 0; m < 3; ++m) {
    const ExpertLayer& layer = source.expert_layers[1];
    const ExpertLayer& given = packed.expert_layers[1];
    const bool native = layer.matrices[m].shape.type == GGML_TYPE_Q4_0;
    EXPECT_EQ(given.matrices[m].native, native);
    std::vector<uint8_t> wanted = range_bytes(source, layer.slab_range(layer.matrices[m], 3));
    if (native)
      std::transform(wanted.begin(), wanted.end(), wanted.begin(),
                     [](uint8_t byte) { return static_cast<uint8_t>(~byte); });
    EXPECT_EQ(range_bytes(packed, given.slab_range(given.matrices[m], 3)), wanted);
    uint8_t byte = 0;
    EXPECT_EQ(packed.read_experts(given, given.matrices[m], 0, &byte, 1).ok(), !native);
  }
  expect_refused(pack(target(), folder_.file("again")), "a native pack cannot be packed again");
}

TEST(DefaultPackFolder, IsTheModelsNameWithoutAPartsNumbers) {
  EXPECT_EQ(default_pack_folder("model.gguf"), "model.pack");
  EXPECT_EQ(default_pack_folder("/a.b/model-Q4_0.gguf"), "/a.b/model-Q4_0.pack");
  EXPECT_EQ(default_pack_folder("x/model-00001-of-00003.gguf"), "x/model.pack");
  EXPECT_EQ(default_pack_folder("x/model-00002-of-00003.gguf"), "x/model.pack");
  EXPECT_EQ(default_pack_folder("model-1-of-3.gguf"), "model-1-of-3.pack");
  EXPECT_EQ(default_pack_folder("model"), "model.pack");
  EXPECT_EQ(default_pack_folder("raw.pack/"), "raw.pack.pack");
}

// What the catalog compares between the two files of a pack.
TEST_F(PackWriterTest, FilesOfTwoPacksDoNotGoTogether) {
  const Catalog source = make(plain_model());
  ASSERT_TRUE(pack(source, target()).ok());
  TestModel other = plain_model();
  other.add("another.weight", GGML_TYPE_F32, {8});
  ASSERT_TRUE(pack(make(other), folder_.file("other")).ok());
  const auto open_words = [&] {
    const auto catalog = Catalog::open(target(), DirectMode::kOff);
    return catalog ? "opened" : catalog.error().message();
  };
  std::filesystem::copy_file(folder_.file("other") + "/" + kPackExpertsName, target() + "/" + kPackExpertsName,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_NE(open_words().find("experts of another pack"), std::string::npos) << open_words();
  std::filesystem::remove(target() + "/" + kPackExpertsName);
  EXPECT_NE(open_words().find("experts are missing"), std::string::npos) << open_words();
  std::filesystem::remove(target() + "/" + kPackModelName);
  EXPECT_NE(open_words().find("no model.gguf"), std::string::npos) << open_words();
}

}  // namespace
}  // namespace sluice::test
