#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "store/catalog.h"
#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::part_path;
using test::plain_model;
using test::TestModel;

class SplitModelTest : public testing::Test {
 protected:
  std::string prefix() const { return folder_.file("model"); }

  static void expect_whole(const TestModel& model, const Catalog& catalog, size_t n_files) {
    EXPECT_EQ(catalog.files.size(), n_files);
    EXPECT_EQ(catalog.architecture, model.architecture);
    EXPECT_EQ(catalog.expert_layers.size(), model.n_layer);
    ASSERT_EQ(catalog.tensors.size(), model.tensors.size());
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      const CatalogTensor& tensor = catalog.tensors[i];
      ASSERT_EQ(tensor.name, model.tensors[i].name);
      std::vector<uint8_t> found(tensor.range.bytes);
      ASSERT_TRUE(catalog.files[tensor.range.file]->read_exactly(tensor.range.offset, found.data(), found.size()).ok());
      EXPECT_EQ(found, model.tensors[i].data()) << tensor.name;
    }
  }

  static void expect_refused(const std::string& path, ErrorCode code, const std::string& named,
                             const std::string& reason) {
    const auto catalog = Catalog::open(path, DirectMode::kOff);
    ASSERT_FALSE(catalog.ok()) << path;
    const std::string text = catalog.error().message();
    EXPECT_EQ(catalog.error().code, code) << text;
    EXPECT_NE(text.find(named), std::string::npos) << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }

  test::TempFolder folder_;
  test::NoGgmlLog no_ggml_log_;
};

TEST_F(SplitModelTest, AnyPartOpensTheWholeModel) {
  const TestModel model = plain_model();
  test::write_split_model(model, prefix(), 3);
  for (const uint32_t number : {1u, 2u, 3u}) {
    const auto catalog = Catalog::open(part_path(prefix(), number, 3), DirectMode::kAuto);
    ASSERT_TRUE(catalog.ok()) << catalog.error().message();
    expect_whole(model, *catalog, 3);
  }
}

TEST_F(SplitModelTest, ExpertsOfOneLayerMayLieInSeveralParts) {
  const TestModel model = plain_model();
  test::write_split_model(model, prefix(), static_cast<uint32_t>(model.tensors.size()));
  const auto catalog =
      Catalog::open(part_path(prefix(), 1, static_cast<uint32_t>(model.tensors.size())), DirectMode::kOff);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  const ExpertLayer& layer = catalog->expert_layers.front();
  EXPECT_NE(layer.spans[0].file, layer.spans[1].file);
  EXPECT_NE(layer.spans[1].file, layer.spans[2].file);
}

TEST_F(SplitModelTest, PartsMayHoldNoTensorsOrAnotherAlignment) {
  const TestModel model = plain_model();
  TestModel aligned = model;
  aligned.alignment = 128;
  const size_t n = model.tensors.size();
  test::write_part(model, part_path(prefix(), 1, 3), 1, 3, 0, 0);
  test::write_part(aligned, part_path(prefix(), 2, 3), 2, 3, 0, 5);
  test::write_part(model, part_path(prefix(), 3, 3), 3, 3, 5, n);
  const auto catalog = Catalog::open(part_path(prefix(), 1, 3), DirectMode::kOff);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  expect_whole(model, *catalog, 3);
}

TEST_F(SplitModelTest, SixtyPartsWithALowLimitOfOpenFiles) {
  const TestModel model = plain_model();
  test::write_split_model(model, prefix(), 60);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const rlim_t soft : {rlim_t{64}, rlim_t{32}}) {
    const rlimit low = {soft, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    const auto catalog = Catalog::open(part_path(prefix(), 7, 60), DirectMode::kAuto);
    if (catalog) {
      expect_whole(model, *catalog, 60);
    } else {
      ADD_FAILURE() << catalog.error().message();
    }
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  }
}

TEST_F(SplitModelTest, ALimitThatCannotBeRaisedIsNamed) {
  test::write_split_model(plain_model(), prefix(), 60);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit low = {40, 40};
    if (setrlimit(RLIMIT_NOFILE, &low) != 0) _exit(2);
    const auto catalog = Catalog::open(part_path(prefix(), 1, 60), DirectMode::kOff);
    const bool named = !catalog.ok() && catalog.error().code == ErrorCode::kUnsupported &&
                       catalog.error().message().find("limit of 40 (ulimit -n)") != std::string::npos;
    _exit(named ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(SplitModelTest, MissingPartIsNamed) {
  test::write_split_model(plain_model(), prefix(), 3);
  std::filesystem::remove(part_path(prefix(), 2, 3));
  for (const uint32_t number : {1u, 3u}) {
    expect_refused(part_path(prefix(), number, 3), ErrorCode::kNotFound, part_path(prefix(), 2, 3),
                   "part 2 of 3 is missing");
  }
}

TEST_F(SplitModelTest, PartsThatBelongElsewhereAreNamed) {
  const TestModel model = plain_model();
  const std::string second = part_path(prefix(), 2, 3);
  const auto restore = [&] { test::write_split_model(model, prefix(), 3); };

  restore();
  std::filesystem::copy_file(part_path(prefix(), 3, 3), second, std::filesystem::copy_options::overwrite_existing);
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "split.no 2 makes it part 3");

  restore();
  test::write_part(model, second, 2, 4, 0, 2);
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "split.count says 4 parts");

  restore();
  TestModel larger = model;
  larger.add("another.weight", GGML_TYPE_F32, {8});
  test::write_part(larger, second, 2, 3, 4, 8);
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "split.tensors.count says 13, in part 1 12");

  restore();
  test::write_part(model, second, 2, 3, 0, 2);
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "'token_embd.weight' stands in part 1 too");

  restore();
  test::write_part(model, second, 2, 3, 4, 6);  // two tensors short
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, part_path(prefix(), 1, 3),
                 "split.tensors.count says 12, the 3 parts hold 10");

  restore();
  GgufContextPtr context = test::context_with_alignment(GGUF_DEFAULT_ALIGNMENT);
  gguf_set_val_str(context.get(), "general.architecture", "llama");
  gguf_set_val_u16(context.get(), "split.no", 1);
  gguf_set_val_u16(context.get(), "split.count", 3);
  gguf_set_val_i32(context.get(), "split.tensors.count", 12);
  test::write_tensors(std::move(context), {model.tensors[4]}, second);
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "architecture 'llama', in part 1 'qwen3moe'");

  restore();
  test::write_model(model, second);  // a whole model under a part's name
  expect_refused(part_path(prefix(), 1, 3), ErrorCode::kBadFile, second, "split.count says 1 parts");
}

TEST_F(SplitModelTest, NamesMustAgreeWithTheMetadata) {
  const TestModel model = plain_model();
  test::write_split_model(model, prefix(), 3);
  const std::string first = part_path(prefix(), 1, 3);

  std::filesystem::copy_file(first, folder_.file("renamed.gguf"));
  expect_refused(folder_.file("renamed.gguf"), ErrorCode::kBadFile, "renamed.gguf", "part 1 of 3, but its name is not");
  std::filesystem::copy_file(first, part_path(prefix(), 1, 4));
  expect_refused(part_path(prefix(), 1, 4), ErrorCode::kBadFile, "-00001-of-00004.gguf", "its name says part 1 of 4");
  std::filesystem::copy_file(first, part_path(folder_.file("other"), 2, 3));
  expect_refused(part_path(folder_.file("other"), 2, 3), ErrorCode::kBadFile, "other-00002", "its name says part 2");

  // A model that is not split may be called like a part.
  test::write_model(model, part_path(folder_.file("whole"), 1, 2));
  const auto catalog = Catalog::open(part_path(folder_.file("whole"), 1, 2), DirectMode::kOff);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  expect_whole(model, *catalog, 1);
}

TEST_F(SplitModelTest, GluedFilesAreRefused) {
  const TestModel model = plain_model();
  test::write_split_model(model, prefix(), 3);
  test::write_model(model, folder_.file("whole.gguf"));
  const auto glue = [&](const std::vector<std::string>& paths, const std::string& target) {
    std::vector<uint8_t> bytes;
    for (const std::string& path : paths) {
      const std::vector<uint8_t> more = test::read_bytes(path);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    test::write_bytes(target, bytes);
  };
  const std::string glued = folder_.file("glued.gguf");
  glue({part_path(prefix(), 1, 3), part_path(prefix(), 2, 3), part_path(prefix(), 3, 3)}, glued);
  expect_refused(glued, ErrorCode::kBadFile, "glued.gguf", "another GGUF starts at offset");
  glue({folder_.file("whole.gguf"), folder_.file("whole.gguf")}, glued);
  expect_refused(glued, ErrorCode::kBadFile, "glued.gguf", "another GGUF starts at offset");
}

TEST_F(SplitModelTest, SymlinkedPartNamesAreFollowed) {
  const TestModel model = plain_model();
  // As a download cache does it: files named by their hash, links named as parts in another folder.
  std::filesystem::create_directory(folder_.file("blobs"));
  std::filesystem::create_directory(folder_.file("snapshot"));
  test::write_split_model(model, prefix(), 3);
  for (uint32_t i = 1; i <= 3; ++i) {
    const std::string blob = fmt::format("blobs/hash{}", i);
    std::filesystem::rename(part_path(prefix(), i, 3), folder_.file(blob));
    std::filesystem::create_symlink("../" + blob, part_path(folder_.file("snapshot/model"), i, 3));
  }
  const std::string linked = part_path(folder_.file("snapshot/model"), 2, 3);
  auto catalog = Catalog::open(linked, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  expect_whole(model, *catalog, 3);

  // A short name of the user's for a part, over two links.
  std::filesystem::create_symlink(linked, folder_.file("long.gguf"));
  std::filesystem::create_symlink("long.gguf", folder_.file("short.gguf"));
  catalog = Catalog::open(folder_.file("short.gguf"), DirectMode::kOff);
  ASSERT_TRUE(catalog.ok()) << catalog.error().message();
  expect_whole(model, *catalog, 3);
}

}  // namespace
}  // namespace sluice
