#include "store/gguf_header.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <limits>

#include "store/catalog.h"
#include "unit/store/gguf_fixture.h"

namespace sluice {
namespace {

using test::RawGguf;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kCpuSecondsMax = 15;  // a sanitizer makes small allocations several times dearer
#else
constexpr double kCpuSecondsMax = 2;
#endif

class GgufHeaderTest : public testing::Test {
 protected:
  // The refusal of a file with these contents: one line, with the file's name, in little time and memory.
  std::string refusal(const std::vector<uint8_t>& bytes) {
    const std::string path = folder_.file("crafted.gguf");
    test::write_bytes(path, bytes);
    return refusal_of_file(path);
  }
  std::string refusal(const RawGguf& gguf) { return refusal(gguf.bytes()); }

  static std::string refusal_of_file(const std::string& path) {
    const rusage before = usage();
    const auto catalog = Catalog::open(path, DirectMode::kOff);
    const rusage after = usage();
    EXPECT_LT(cpu_seconds(after) - cpu_seconds(before), kCpuSecondsMax);
    EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 512 * 1024);  // KiB
    if (catalog) return "opened";
    const std::string text = catalog.error().message();
    EXPECT_EQ(catalog.error().code, ErrorCode::kBadFile) << text;
    EXPECT_NE(text.find(path), std::string::npos) << text;
    for (const char c : text) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << text;
    return text;
  }

  static rusage usage() {
    rusage figures{};
    getrusage(RUSAGE_SELF, &figures);
    return figures;
  }
  static double cpu_seconds(const rusage& figures) {
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return seconds(figures.ru_utime) + seconds(figures.ru_stime);
  }

  void expect_refused(const RawGguf& gguf, const std::string& reason) {
    const std::string text = refusal(gguf);
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  }

  // A preamble and the keys that a dense model of one layer needs.
  static RawGguf model(uint64_t n_tensors, uint64_t n_more_keys = 0) {
    RawGguf gguf;
    gguf.preamble(n_tensors, 2 + n_more_keys).key_text("general.architecture", "llama");
    return gguf.key_u32("llama.block_count", 1);
  }
  // As above with one tensor, its table entry last.
  static RawGguf model_with_tensor(const std::vector<int64_t>& ne, int32_t type, uint64_t offset = 0) {
    return model(1).tensor("a", ne, type, offset).pad(32).zeros(4096);
  }

  test::TempFolder folder_;
  test::NoGgmlLog no_ggml_log_;
};

TEST_F(GgufHeaderTest, TheCraftedFilesAreSoundButForTheirFault) {
  EXPECT_EQ(refusal(model_with_tensor({32, 4}, GGML_TYPE_F32)), "opened");
  EXPECT_EQ(refusal(model(1, 1).key_u32("general.alignment", 64).tensor("a", {8}, 0, 0).pad(64).zeros(32)), "opened");
}

TEST_F(GgufHeaderTest, Preamble) {
  expect_refused(RawGguf(), "magic: 4 bytes are wanted at offset 0, the file has 0 more");
  expect_refused(RawGguf().raw("GG\n\x1b").zeros(64), "magic: wanted 'GGUF', found 'GG\?\?'");
  expect_refused(RawGguf().preamble(0, 0, 0), "version: wanted 2 to 3, found 0");
  expect_refused(RawGguf().preamble(0, 0, 1), "version: wanted 2 to 3, found 1");
  expect_refused(RawGguf().preamble(0, 0, 4), "version: wanted 2 to 3, found 4");
  expect_refused(RawGguf().preamble(0, 0, 0x03000000), "big-endian");
  expect_refused(RawGguf().preamble(uint64_t{1} << 62, 0).zeros(64), "tensor count");
  expect_refused(RawGguf().preamble(std::numeric_limits<uint64_t>::max(), 0).zeros(64), "tensor count");
  expect_refused(RawGguf().preamble(0, uint64_t{1} << 40).zeros(64), "key count");
}

TEST_F(GgufHeaderTest, Keys) {
  expect_refused(RawGguf().preamble(0, 1).value(uint64_t{1} << 60).zeros(64), "key 0: 1152921504606846976 bytes");
  expect_refused(RawGguf().preamble(0, 1).text("").zeros(64), "key 0 is empty");
  expect_refused(RawGguf().preamble(0, 1).text(std::string("a\0b", 3)).zeros(64), "zero byte");
  expect_refused(RawGguf().preamble(0, 2).key_u32("a", 1).key_u32("a", 2), "key 'a' stands there twice");
  expect_refused(RawGguf().preamble(0, 1).text("a").value<int32_t>(99).zeros(64), "unknown value type 99");
  expect_refused(RawGguf().preamble(0, 1).text("a").value<int32_t>(-1).zeros(64), "unknown value type -1");
  expect_refused(RawGguf().preamble(0, 1).text("a").value<int32_t>(GGUF_TYPE_STRING).value(uint64_t{1} << 60),
                 "key 'a': 1152921504606846976 bytes are wanted");
}

TEST_F(GgufHeaderTest, Arrays) {
  const auto array = [](int32_t type, uint64_t count) {
    return RawGguf().preamble(0, 1).text("a").value<int32_t>(GGUF_TYPE_ARRAY).value(type).value(count).zeros(64);
  };
  expect_refused(array(GGUF_TYPE_ARRAY, 1), "an array of arrays");
  expect_refused(array(GGUF_TYPE_UINT8, 65), "key 'a': 65 bytes are wanted");
  expect_refused(array(GGUF_TYPE_UINT64, uint64_t{1} << 61), "an array of 2305843009213693952 elements");
  expect_refused(array(GGUF_TYPE_STRING, uint64_t{1} << 61), "more than 2097152 texts");
  expect_refused(array(GGUF_TYPE_STRING, 9), "key 'a': 8 bytes are wanted");
  expect_refused(array(99, 1), "unknown value type 99");
}

// Empty texts cost 8 bytes in a file, or none in a hole, and four times that in memory.
TEST_F(GgufHeaderTest, HolesDoNotBecomeMemory) {
  const auto sparse = [&](const RawGguf& gguf, const std::string& reason) {
    const std::string path = folder_.file("sparse.gguf");
    test::write_bytes(path, gguf.bytes());
    std::filesystem::resize_file(path, uint64_t{1} << 40);
    const std::string text = refusal_of_file(path);
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  };
  const auto array = [](int32_t type, uint64_t count) {
    return RawGguf().preamble(0, 1).text("a").value<int32_t>(GGUF_TYPE_ARRAY).value(type).value(count);
  };
  sparse(array(GGUF_TYPE_STRING, uint64_t{1} << 30), "more than 2097152 texts");
  sparse(array(GGUF_TYPE_UINT8, uint64_t{1} << 30), "elements");
  sparse(array(GGUF_TYPE_UINT64, uint64_t{1} << 25), "the header is larger than 64.0 MiB");
  sparse(RawGguf().preamble(0, 1).text("a").value<int32_t>(GGUF_TYPE_STRING).value(uint64_t{1} << 30),
         "the header is larger than 64.0 MiB");
  sparse(RawGguf().preamble(kHeaderTensorsMax, 0), "name of tensor 0 is empty");
}

TEST_F(GgufHeaderTest, TheLargestHeaderThatIsAllowedStaysInBounds) {
  RawGguf gguf;
  gguf.preamble(0, 1).text("a").value<int32_t>(GGUF_TYPE_ARRAY).value<int32_t>(GGUF_TYPE_STRING);
  gguf.value(kHeaderStringsMax);
  for (uint64_t i = 0; i < kHeaderStringsMax; ++i) gguf.text("sixteen letters.");
  expect_refused(gguf, "'general.architecture' is missing");
}

TEST_F(GgufHeaderTest, Alignment) {
  for (const uint32_t alignment : {0u, 3u, 48u}) {
    expect_refused(model(1, 1).key_u32("general.alignment", alignment).tensor("a", {8}, 0, 0).zeros(4096),
                   fmt::format("key 'general.alignment': wanted a power of two, found {}", alignment));
  }
  for (const uint32_t alignment : {1u << 30, 1u << 31}) {
    expect_refused(model(1, 1).key_u32("general.alignment", alignment).tensor("a", {8}, 0, 0).zeros(4096),
                   fmt::format("tensor data starts at offset {}", alignment));
  }
  RawGguf gguf = model(1, 1);
  gguf.text("general.alignment").value<int32_t>(GGUF_TYPE_UINT64).value<uint64_t>(32).tensor("a", {8}, 0, 0);
  expect_refused(gguf.zeros(4096), "key 'general.alignment': wanted a u32");
}

TEST_F(GgufHeaderTest, TensorNames) {
  expect_refused(model(1).tensor("", {8}, 0, 0).pad(32).zeros(64), "name of tensor 0 is empty");
  expect_refused(model(1).tensor(std::string("a\0b", 3), {8}, 0, 0).pad(32).zeros(64), "zero byte");
  expect_refused(model(1).tensor(std::string(GGML_MAX_NAME, 'x'), {8}, 0, 0).pad(32).zeros(64), "at most 63");
  expect_refused(model(1).value(uint64_t{1} << 60).zeros(64), "name of tensor 0: 1152921504606846976 bytes");
  expect_refused(model(2).tensor("a", {8}, 0, 0).tensor("a", {8}, 0, 32).pad(32).zeros(64),
                 "tensor 'a' stands there twice");
}

TEST_F(GgufHeaderTest, Shapes) {
  constexpr int64_t kBig = int64_t{1} << 32;
  expect_refused(model_with_tensor({1, 1, 1, 1, 1, 1, 1, 1, 1}, 0), "tensor 'a': 9 dimensions, at most 4");
  expect_refused(model(1).text("a").value(std::numeric_limits<uint32_t>::max()).zeros(64), "4294967295 dimensions");
  expect_refused(model_with_tensor({8, 0}, 0), "dimension 1 is 0");
  expect_refused(model_with_tensor({8, -1}, 0), "dimension 1 is -1");
  expect_refused(model_with_tensor({kBig, kBig}, 0), "the shape overflows");
  expect_refused(model_with_tensor({kBig, kBig / 2}, 0), "the shape overflows");
  expect_refused(model_with_tensor({kBig, kBig / 4}, 0), "its size overflows");
  // Elements fit into 63 bits, and ggml's product of row and block bytes would wrap to a small size.
  expect_refused(model_with_tensor({int64_t{1} << 62, 1}, GGML_TYPE_Q4_0), "its size overflows");
  expect_refused(model_with_tensor({int64_t{1} << 59, 1}, GGML_TYPE_Q8_0), "its size overflows");
}

TEST_F(GgufHeaderTest, Types) {
  for (const int32_t type : {-1, 43, 99, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    expect_refused(model_with_tensor({32}, type), fmt::format("unknown type {}", type));
  }
  for (const int32_t type : {4, 5, 31, 32, 33, 36, 37, 38}) {
    expect_refused(model_with_tensor({32}, type), fmt::format("type {} was withdrawn", type));
  }
  expect_refused(model_with_tensor({33}, GGML_TYPE_Q4_0), "rows of 33 elements, but q4_0 has blocks of 32");
}

TEST_F(GgufHeaderTest, Offsets) {
  expect_refused(model_with_tensor({1024}, 0, 32), "offset 32, expected 0");
  expect_refused(model_with_tensor({1024}, 0, uint64_t{1} << 63), "offset 9223372036854775808, expected 0");
  expect_refused(model_with_tensor({1025}, 0), "but the file ends at");
  expect_refused(model(2).tensor("a", {16}, 0, 0).tensor("b", {16}, 0, 32).pad(32).zeros(256),
                 "tensor 'b': offset 32 lies inside the tensor before it");
  expect_refused(model(2).tensor("a", {16}, 0, 0).tensor("b", {16}, 0, 0).pad(32).zeros(256),
                 "tensor 'b': offset 0 lies inside the tensor before it");
  // Too small a region for what the shape says: the next tensor starts inside it.
  expect_refused(model(2).tensor("a", {64, 3}, GGML_TYPE_Q4_0, 0).tensor("b", {16}, 0, 96).pad(32).zeros(256),
                 "tensor 'b': offset 96 lies inside the tensor before it");
  expect_refused(model(2).tensor("a", {16}, 0, 0).tensor("b", {16}, 0, uint64_t{1} << 62).pad(32).zeros(256),
                 "tensor 'b': offset 4611686018427387904, expected 64");
}

TEST_F(GgufHeaderTest, TextFromTheFileCannotBreakTheLine) {
  expect_refused(model(1).tensor("a\nb\x1b[2J", {8, 0}, 0, 0).zeros(64), "tensor 'a?b?[2J': dimension 1 is 0");
}

TEST_F(GgufHeaderTest, CutAnywhere) {
  test::write_model(test::plain_model(), folder_.file("whole.gguf"));
  const std::vector<uint8_t> whole = test::read_bytes(folder_.file("whole.gguf"));
  const auto catalog = Catalog::open(folder_.file("whole.gguf"), DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  const FileRange& first = catalog->tensors.front().range;
  const FileRange& last = catalog->tensors.back().range;
  const uint64_t data_end = last.offset + last.bytes;

  std::vector<uint64_t> cuts = {0, 3, 4, 8, 16, 23, first.offset - 1, first.offset, first.offset + 1, data_end - 1};
  for (const ExpertLayer& layer : catalog->expert_layers) {
    for (const ExpertMatrix& matrix : layer.matrices) {
      const uint64_t begin = layer.slab_range(matrix, 0).offset;
      cuts.push_back(begin);
      cuts.push_back(begin + matrix.shape.slab_bytes);
      cuts.push_back(begin + matrix.shape.total_bytes() - 1);
    }
  }
  for (uint64_t cut = 24; cut < first.offset; cut += 7) cuts.push_back(cut);
  for (const uint64_t cut : cuts) {
    const std::string text = refusal({whole.begin(), whole.begin() + static_cast<ptrdiff_t>(cut)});
    EXPECT_TRUE(text.find("bytes are wanted") != std::string::npos || text.find("file ends at") != std::string::npos ||
                text.find("data starts at") != std::string::npos)
        << "cut at " << cut << ": " << text;
  }
  ASSERT_LT(data_end, whole.size());
  EXPECT_EQ(refusal({whole.begin(), whole.begin() + static_cast<ptrdiff_t>(data_end)}), "opened")
      << "the last tensor's padding may be missing";
}

// Every byte of a header changed in turn: a refusal or a catalog, and ggml never has a word to say.
TEST_F(GgufHeaderTest, ChangedBytes) {
  const std::string path = folder_.file("whole.gguf");
  test::write_model(test::plain_model(), path);
  const std::vector<uint8_t> whole = test::read_bytes(path);
  const auto catalog = Catalog::open(path, DirectMode::kOff);
  ASSERT_TRUE(catalog.ok());
  size_t refused = 0;
  for (size_t i = 0; i < catalog->tensors.front().range.offset; ++i) {
    for (const int change : {0x01, 0x80, 0xff}) {
      const auto write = [&](uint8_t byte) {
        std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
        stream.seekp(static_cast<std::streamoff>(i));
        stream.put(static_cast<char>(byte));
      };
      write(static_cast<uint8_t>(whole[i] ^ change));
      if (refusal_of_file(path) != "opened") ++refused;
      write(whole[i]);
    }
  }
  EXPECT_GT(refused, 0u);
}

TEST(PrintableTest, KeepsTextAndReplacesControls) {
  EXPECT_EQ(printable("blk.0.ffn_up_exps.weight"), "blk.0.ffn_up_exps.weight");
  EXPECT_EQ(printable("M\xc3\xbcller"), "M\xc3\xbcller");
  EXPECT_EQ(printable("a\tb\r\n\x7f\x1b"), "a?b????");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "b"),
            "a?b");
  EXPECT_LT(printable(std::string(10000, 'x')).size(), 128u);
  EXPECT_LT(printable(std::string(10000, '\x80')).size(), 128u);
}

}  // namespace
}  // namespace sluice
