// Copies of a model's file: what is taken for one, and what is refused with one line that says why.
#include "store/model_copy.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "store/catalog.h"
#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

constexpr const char* kModel = SLUICE_SOURCE_DIR "/models/tiny-qwen3next-128x8-q4_0.gguf";
constexpr const char* kName = "tiny-qwen3next-128x8-q4_0.gguf";

class ModelCopy : public testing::Test {
 protected:
  void SetUp() override {
    original_ = File::open(kModel, DirectMode::kOff).value();
    bytes_ = test::read_bytes(kModel);
  }
  Result<std::shared_ptr<const File>> open_copy() {
    return open_model_copy(*original_, folder_.path(), DirectMode::kOff);
  }
  void expect_refused(ErrorCode code, const std::string& what) {
    const auto copy = open_copy();
    ASSERT_FALSE(copy.ok()) << what;
    EXPECT_EQ(copy.error().code, code) << copy.error().message();
    EXPECT_NE(copy.error().message().find(what), std::string::npos) << copy.error().message();
    EXPECT_NE(copy.error().message().find(folder_.file(kName)), std::string::npos) << copy.error().message();
    EXPECT_EQ(copy.error().message().find('\n'), std::string::npos);
  }

  test::TempFolder folder_;
  std::shared_ptr<const File> original_;
  std::vector<uint8_t> bytes_;
};

TEST_F(ModelCopy, EqualFilesAreCopies) {
  test::write_bytes(folder_.file(kName), bytes_);
  const auto copy = open_copy();
  ASSERT_TRUE(copy.ok()) << copy.error().message();
  EXPECT_EQ((*copy)->path(), folder_.file(kName));
}

TEST_F(ModelCopy, MissingIsNamed) {
  expect_refused(ErrorCode::kNotFound, "No such file");
}

TEST_F(ModelCopy, CutByOneByteIsRefused) {
  bytes_.pop_back();
  test::write_bytes(folder_.file(kName), bytes_);
  expect_refused(ErrorCode::kBadFile, std::to_string(bytes_.size()));
}

TEST_F(ModelCopy, AnyFlippedHeaderByteIsRefusedAndNamed) {
  // The last one stands just before the first tensor's data.
  uint64_t data_begin = bytes_.size();
  const auto catalog = Catalog::open(kModel, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  for (const CatalogTensor& tensor : catalog->tensors) {
    data_begin = std::min(data_begin, tensor.range.offset);
  }
  for (const uint64_t at : {uint64_t{0}, uint64_t{100}, data_begin / 2, data_begin - 1}) {
    std::vector<uint8_t> flipped = bytes_;
    flipped[at] ^= 1;
    test::write_bytes(folder_.file(kName), flipped);
    expect_refused(ErrorCode::kBadFile, "byte " + std::to_string(at) + " differs");
  }
}

// Another quantisation or another training state of the same size: differs everywhere, or in some large stretch.
TEST_F(ModelCopy, OtherDataOfTheSameSizeIsRefused) {
  for (const double from : {0.0, 0.5, 0.95}) {
    std::vector<uint8_t> other = bytes_;
    const auto begin = static_cast<size_t>(static_cast<double>(bytes_.size()) * from);
    for (size_t i = std::max<size_t>(begin, bytes_.size() / 4); i < other.size(); ++i) other[i] ^= 0x55;
    test::write_bytes(folder_.file(kName), other);
    expect_refused(ErrorCode::kBadFile, "differs");
  }
  std::vector<uint8_t> other = bytes_;
  other.back() ^= 1;
  test::write_bytes(folder_.file(kName), other);
  expect_refused(ErrorCode::kBadFile, "byte " + std::to_string(bytes_.size() - 1) + " differs");
}

TEST_F(ModelCopy, TheModelItselfIsNoCopy) {
  std::filesystem::create_symlink(kModel, folder_.file(kName));
  expect_refused(ErrorCode::kBadArgument, "own file");
}

// Files that are no GGUF (packs) and small ones.
TEST_F(ModelCopy, OtherFormatsAndSmallFiles) {
  test::TempFolder source;
  for (const size_t size : {size_t{1}, size_t{5000}, size_t{3} << 20}) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 31 >> 3);
    test::write_bytes(source.file("p"), bytes);
    test::write_bytes(folder_.file("p"), bytes);
    const auto original = File::open(source.file("p"), DirectMode::kOff).value();
    EXPECT_TRUE(open_model_copy(*original, folder_.path(), DirectMode::kOff).ok()) << size;
    bytes[size / 5] ^= 1;
    test::write_bytes(folder_.file("p"), bytes);
    EXPECT_FALSE(open_model_copy(*original, folder_.path(), DirectMode::kOff).ok()) << size;
  }
}

}  // namespace
}  // namespace sluice
