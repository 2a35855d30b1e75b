#include "store/model_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::part_path;
using test::plain_model;
using test::TestModel;
using test::TestTensor;

constexpr uint8_t kPattern = 0xa5;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FilePtr = std::unique_ptr<std::FILE, FileCloser>;

class ModelStreamTest : public testing::Test {
 protected:
  static FilePtr open_stream(const std::string& path) {
    const auto catalog = Catalog::open(path, DirectMode::kOff);
    EXPECT_TRUE(catalog.ok()) << (catalog ? "" : catalog.error().message());
    if (!catalog) return nullptr;
    // The catalog goes out of scope here: the stream keeps what it needs.
    const auto stream = open_model_stream(*catalog);
    EXPECT_TRUE(stream.ok()) << (stream ? "" : stream.error().message());
    return FilePtr(stream ? *stream : nullptr);
  }

  static std::vector<uint8_t> read_at(std::FILE* file, uint64_t offset, uint64_t bytes) {
    std::vector<uint8_t> buffer(bytes, kPattern);
    EXPECT_EQ(fseeko(file, static_cast<off_t>(offset), SEEK_SET), 0);
    EXPECT_EQ(std::fread(buffer.data(), 1, buffer.size(), file), buffer.size());
    return buffer;
  }

  // Reads the stream as llama.cpp does: the header, then tensor after tensor at its offset.
  static void expect_model(const TestModel& model, std::FILE* file) {
    const GgufContextPtr context(gguf_init_from_file_ptr(file, {true, nullptr}));
    ASSERT_NE(context, nullptr);
    EXPECT_LT(gguf_find_key(context.get(), "split.no"), 0);
    EXPECT_LT(gguf_find_key(context.get(), "split.count"), 0);
    EXPECT_LT(gguf_find_key(context.get(), "split.tensors.count"), 0);
    const int64_t architecture = gguf_find_key(context.get(), "general.architecture");
    ASSERT_GE(architecture, 0);
    EXPECT_EQ(gguf_get_val_str(context.get(), architecture), model.architecture);
    EXPECT_EQ(gguf_get_alignment(context.get()), model.alignment);

    ASSERT_EQ(fseeko(file, 0, SEEK_END), 0);
    const uint64_t size = static_cast<uint64_t>(ftello(file));
    ASSERT_EQ(gguf_get_n_tensors(context.get()), static_cast<int64_t>(model.tensors.size()));
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      const TestTensor& tensor = model.tensors[i];
      const auto index = static_cast<int64_t>(i);
      ASSERT_EQ(gguf_get_tensor_name(context.get(), index), tensor.name);
      EXPECT_EQ(gguf_get_tensor_type(context.get(), index), tensor.type);
      EXPECT_EQ(gguf_get_tensor_size(context.get(), index), tensor.bytes());
      const uint64_t offset = gguf_get_data_offset(context.get()) + gguf_get_tensor_offset(context.get(), index);
      ASSERT_LE(offset + tensor.bytes(), size);
      const std::vector<uint8_t> found = read_at(file, offset, tensor.bytes());
      if (parse_expert_tensor_name(tensor.name)) {
        EXPECT_EQ(found, std::vector<uint8_t>(tensor.bytes(), 0)) << tensor.name << " is an expert's";
      } else {
        EXPECT_EQ(found, tensor.data()) << tensor.name;
      }
    }
  }

  test::TempFolder folder_;
};

TEST_F(ModelStreamTest, DenseTensorsAreReadAndExpertsAreZeros) {
  const TestModel model = plain_model();
  test::write_model(model, folder_.file("model.gguf"));
  const FilePtr stream = open_stream(folder_.file("model.gguf"));
  ASSERT_NE(stream, nullptr);
  expect_model(model, stream.get());
}

// One file streams as itself, but for what experts would have held.
TEST_F(ModelStreamTest, OneReadOverEverything) {
  const TestModel model = plain_model();
  const std::string path = folder_.file("model.gguf");
  test::write_model(model, path);
  std::vector<uint8_t> wanted = test::read_bytes(path);
  const auto catalog = Catalog::open(path, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  for (const CatalogTensor& tensor : catalog->tensors) {
    if (!parse_expert_tensor_name(tensor.name)) continue;
    const auto begin = wanted.begin() + static_cast<ptrdiff_t>(tensor.range.offset);
    std::fill(begin, begin + static_cast<ptrdiff_t>(tensor.range.bytes), uint8_t{0});
  }
  const FilePtr stream = open_stream(path);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(read_at(stream.get(), 0, wanted.size()), wanted) << "padding reads as zeros, as it was written";
  EXPECT_EQ(std::fgetc(stream.get()), EOF);
  EXPECT_TRUE(std::feof(stream.get()));

  // Pieces of any size and place give the same bytes.
  for (const size_t piece : {1u, 7u, 61u, 4096u}) {
    std::rewind(stream.get());
    std::vector<uint8_t> found(wanted.size(), kPattern);
    for (size_t done = 0; done < found.size(); done += piece) {
      const size_t step = std::min(piece, found.size() - done);
      ASSERT_EQ(std::fread(found.data() + done, 1, step, stream.get()), step);
    }
    EXPECT_EQ(found, wanted) << "in pieces of " << piece;
  }
}

TEST_F(ModelStreamTest, SplitModelIsOneFile) {
  TestModel model = plain_model();
  for (const uint32_t alignment : {32u, 128u}) {
    model.alignment = alignment;
    for (const uint32_t count : {3u, 20u}) {
      const std::string prefix = folder_.file(fmt::format("model{}", alignment));
      test::write_split_model(model, prefix, count);
      const FilePtr stream = open_stream(part_path(prefix, 2, count));
      ASSERT_NE(stream, nullptr);
      expect_model(model, stream.get());
    }
  }
}

TEST_F(ModelStreamTest, PartsOfAnotherAlignment) {
  const TestModel model = plain_model();
  TestModel aligned = model;
  aligned.alignment = 256;
  const std::string prefix = folder_.file("model");
  test::write_part(model, part_path(prefix, 1, 2), 1, 2, 0, 3);
  test::write_part(aligned, part_path(prefix, 2, 2), 2, 2, 3, model.tensors.size());
  const FilePtr stream = open_stream(part_path(prefix, 1, 2));
  ASSERT_NE(stream, nullptr);
  expect_model(model, stream.get());
}

TEST_F(ModelStreamTest, SymlinkedSplitModel) {
  const TestModel model = plain_model();
  std::filesystem::create_directory(folder_.file("links"));
  test::write_split_model(model, folder_.file("model"), 3);
  for (uint32_t i = 1; i <= 3; ++i) {
    const std::string blob = fmt::format("blob{}", i);
    std::filesystem::rename(part_path(folder_.file("model"), i, 3), folder_.file(blob));
    std::filesystem::create_symlink("../" + blob, part_path(folder_.file("links/model"), i, 3));
  }
  const FilePtr stream = open_stream(part_path(folder_.file("links/model"), 1, 3));
  ASSERT_NE(stream, nullptr);
  expect_model(model, stream.get());
}

TEST_F(ModelStreamTest, MetadataOfEveryTypeIsKept) {
  TestModel model = plain_model();
  model.more_keys = [](gguf_context* context) {
    const char* texts[] = {"a", "", "c"};
    const float numbers[] = {1.5f, -2.0f};
    const bool flags[] = {true, false, true};
    gguf_set_arr_str(context, "t.texts", texts, 3);
    gguf_set_arr_data(context, "t.numbers", GGUF_TYPE_FLOAT32, numbers, 2);
    gguf_set_arr_data(context, "t.flags", GGUF_TYPE_BOOL, flags, 3);
    gguf_set_val_bool(context, "t.flag", true);
    gguf_set_val_f64(context, "t.f64", 0.25);
  };
  test::write_split_model(model, folder_.file("model"), 2);
  const FilePtr stream = open_stream(part_path(folder_.file("model"), 1, 2));
  ASSERT_NE(stream, nullptr);
  const GgufContextPtr context(gguf_init_from_file_ptr(stream.get(), {true, nullptr}));
  ASSERT_NE(context, nullptr);
  const int64_t texts = gguf_find_key(context.get(), "t.texts");
  ASSERT_GE(texts, 0);
  ASSERT_EQ(gguf_get_arr_n(context.get(), texts), 3u);
  EXPECT_STREQ(gguf_get_arr_str(context.get(), texts, 2), "c");
  const int64_t flags = gguf_find_key(context.get(), "t.flags");
  ASSERT_GE(flags, 0);
  EXPECT_EQ(gguf_get_arr_n(context.get(), flags), 3u);
  EXPECT_EQ(gguf_get_val_f64(context.get(), gguf_find_key(context.get(), "t.f64")), 0.25);
}

TEST_F(ModelStreamTest, AFileCutWhileLoadingIsAFailedRead) {
  const TestModel model = plain_model();
  const std::string path = folder_.file("model.gguf");
  test::write_model(model, path);
  const FilePtr stream = open_stream(path);
  ASSERT_NE(stream, nullptr);
  const GgufContextPtr context(gguf_init_from_file_ptr(stream.get(), {true, nullptr}));
  ASSERT_NE(context, nullptr);
  const uint64_t offset = gguf_get_data_offset(context.get());
  std::filesystem::resize_file(path, offset);
  ASSERT_EQ(fseeko(stream.get(), static_cast<off_t>(offset), SEEK_SET), 0);
  std::vector<uint8_t> buffer(64);
  errno = 0;
  EXPECT_EQ(std::fread(buffer.data(), 1, buffer.size(), stream.get()), 0u);
  EXPECT_TRUE(std::ferror(stream.get()));
  EXPECT_NE(errno, 0);
}

// A file that ends where its experts start goes on being read: nothing of it is asked for.
TEST_F(ModelStreamTest, ExpertsAreNotReadFromTheFile) {
  TestModel model = plain_model();
  std::stable_partition(model.tensors.begin(), model.tensors.end(),
                        [](const TestTensor& tensor) { return !parse_expert_tensor_name(tensor.name); });
  const std::string path = folder_.file("model.gguf");
  test::write_model(model, path);
  const auto catalog = Catalog::open(path, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  const FilePtr stream = open_stream(path);
  ASSERT_NE(stream, nullptr);
  const CatalogTensor& last_dense = *std::find_if(catalog->tensors.rbegin(), catalog->tensors.rend(),
                                                  [](const auto& t) { return !parse_expert_tensor_name(t.name); });
  std::filesystem::resize_file(path, last_dense.range.offset + last_dense.range.bytes);
  expect_model(model, stream.get());
}

TEST_F(ModelStreamTest, AFileThatChangedAfterTheCatalogIsRefused) {
  const std::string path = folder_.file("model.gguf");
  test::write_model(plain_model(), path);
  const auto catalog = Catalog::open(path, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  std::filesystem::resize_file(path, 100);
  const auto stream = open_model_stream(*catalog);
  ASSERT_FALSE(stream.ok());
  EXPECT_EQ(stream.error().code, ErrorCode::kChanged);
}

TEST_F(ModelStreamTest, SeeksAsAFileDoes) {
  test::write_model(plain_model(), folder_.file("model.gguf"));
  const FilePtr stream = open_stream(folder_.file("model.gguf"));
  ASSERT_NE(stream, nullptr);
  EXPECT_NE(fseeko(stream.get(), -1, SEEK_SET), 0);
  ASSERT_EQ(fseeko(stream.get(), 4, SEEK_SET), 0);
  ASSERT_EQ(fseeko(stream.get(), 4, SEEK_CUR), 0);
  EXPECT_EQ(ftello(stream.get()), 8);
  ASSERT_EQ(fseeko(stream.get(), -8, SEEK_END), 0);
  uint8_t tail[16] = {};
  EXPECT_EQ(std::fread(tail, 1, sizeof(tail), stream.get()), 8u);
}

}  // namespace
}  // namespace sluice
