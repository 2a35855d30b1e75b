// The index of a pack's experts file: what is written is read back, and whatever else stands there is refused in one
// line or consistent.
#include "store/pack_format.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "base/bytes.h"
#include "unit/store/gguf_fixture.h"

namespace sluice::test {
namespace {

// Of the header; docs/pack-format.md has the table.
constexpr size_t kVersionOffset = 8;
constexpr size_t kLayoutOffset = 12;
constexpr size_t kIndexBytesOffset = 48;
constexpr size_t kIndexSumOffset = 56;
constexpr size_t kHeaderSumOffset = 64;

PackLayer small_layer(uint32_t number, uint32_t n_expert) {
  PackLayer layer{.layer = number, .n_expert = n_expert, .n_matrix = 3};
  uint64_t end = 0;
  const auto add = [&](const std::string& rest, ggml_type type, int64_t ne0, int64_t ne1) {
    const uint64_t bytes = ggml_row_size(type, ne0) * static_cast<uint64_t>(ne1);
    const uint64_t offset = align_up(end, kPackSegmentAlignBytes);
    layer.segments.push_back(
        {.name = layer_tensor(number, rest), .type = type, .ne0 = ne0, .ne1 = ne1, .offset = offset, .bytes = bytes});
    end = offset + bytes;
  };
  add("ffn_gate_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf);
  add("ffn_up_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf);
  add("ffn_down_exps.weight", GGML_TYPE_Q8_0, kFf, kHidden);
  layer.read_bytes = end;
  add("ffn_up_exps.bias", GGML_TYPE_F32, kFf, 1);
  layer.record_stride_bytes = align_up(end, kPackAlignBytes);
  for (uint64_t i = 0; i < n_expert * layer.segments.size(); ++i) layer.checksums.push_back(number * 1000 + i);
  return layer;
}

PackIndex small_index() {
  PackIndex index{.layout = PackLayout::kNative,
                  .id = {1, 2},
                  .source = {3, 4},
                  .native_tag = "ggml 0 test",
                  .model_header_checksum = 5,
                  .dense_checksums = {6, 7, 8},
                  .layers = {small_layer(1, 3), small_layer(4, 2)}};
  index.layers[0].segments[1].native = true;
  uint64_t offset = pack_front_bytes(index);
  for (PackLayer& layer : index.layers) {
    layer.record_offset = offset;
    offset += layer.record_stride_bytes * layer.n_expert;
  }
  return index;
}

// A file with this front and records of zeros, open while its bytes are changed.
class IndexFile {
 public:
  explicit IndexFile(const PackIndex& index) : front_(encode_pack_front(index)) {
    const PackLayer& last = index.layers.back();
    size_bytes_ = last.record_offset + last.record_stride_bytes * last.n_expert;
    fd_ = ::open(path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    write(front_, size_bytes_);
  }
  ~IndexFile() { ::close(fd_); }
  IndexFile(const IndexFile&) = delete;

  void write(const std::vector<std::byte>& front, uint64_t size_bytes) {
    ASSERT_EQ(::pwrite(fd_, front.data(), front.size(), 0), static_cast<ssize_t>(front.size()));
    ASSERT_EQ(::ftruncate(fd_, static_cast<off_t>(size_bytes)), 0);
  }
  void put(size_t offset, std::byte byte) { ASSERT_EQ(::pwrite(fd_, &byte, 1, static_cast<off_t>(offset)), 1); }
  Result<PackIndex> read() const {
    const auto file = File::open(path(), DirectMode::kOff);
    EXPECT_TRUE(file.ok());
    return read_pack_index(**file);
  }
  std::string path() const { return folder_.file("experts.sluice"); }
  const std::vector<std::byte>& front() const { return front_; }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  TempFolder folder_;
  std::vector<std::byte> front_;
  uint64_t size_bytes_ = 0;
  int fd_ = -1;
};

template <typename T>
T value_at(const std::vector<std::byte>& bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

template <typename T>
void set_value(std::vector<std::byte>& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

void make_sums_right(std::vector<std::byte>& front) {
  set_value(front, kIndexSumOffset,
            pack_checksum(front.data() + kPackHeaderBytes, value_at<uint64_t>(front, kIndexBytesOffset)));
  set_value(front, kHeaderSumOffset, pack_checksum(front.data(), kHeaderSumOffset));
}

void expect_refused(const Result<PackIndex>& index, const IndexFile& file, const std::string& word = "") {
  ASSERT_FALSE(index.ok());
  EXPECT_EQ(index.error().code, ErrorCode::kBadFile);
  const std::string text = index.error().message();
  EXPECT_NE(text.find(file.path()), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  EXPECT_NE(text.find(word), std::string::npos) << text;
}

TEST(PackFormat, WhatIsWrittenIsReadBack) {
  const PackIndex index = small_index();
  const IndexFile file(index);
  const auto read = file.read();
  ASSERT_TRUE(read.ok()) << read.error().message();
  EXPECT_EQ(encode_pack_front(*read), file.front());
  EXPECT_EQ(read->id.text(), "00000000000000010000000000000002");
  EXPECT_EQ(read->native_tag, "ggml 0 test");
  EXPECT_TRUE(read->layers[0].segments[1].native);
  EXPECT_EQ(read->layers[1].checksum(1, 2), 4000 + 1 * 4 + 2u);
}

TEST(PackFormat, TheOffsetsOfTheHeaderAreThoseOfTheDocument) {
  const std::vector<std::byte> front = encode_pack_front(small_index());
  EXPECT_EQ(std::memcmp(front.data(), "SLUICEPK", 8), 0);
  EXPECT_EQ(value_at<uint32_t>(front, kVersionOffset), 1u);
  EXPECT_EQ(value_at<uint32_t>(front, kLayoutOffset), 1u);
  EXPECT_EQ(value_at<uint64_t>(front, 16), 1u);
  EXPECT_EQ(value_at<uint64_t>(front, 40), 4u);
  EXPECT_EQ(value_at<uint32_t>(front, 4096), 11u) << "the tag's length opens the index";
  EXPECT_EQ(front.size() % 4096, 0u);
  std::vector<std::byte> again = front;
  make_sums_right(again);
  EXPECT_EQ(again, front) << "the sums stand where the document says, over what it says";
}

TEST(PackFormat, EveryFlippedByteIsRefused) {
  IndexFile file(small_index());
  for (size_t i = 0; i < file.front().size(); ++i) {
    file.put(i, file.front()[i] ^ std::byte{0x10});
    expect_refused(file.read(), file);
    file.put(i, file.front()[i]);
    if (HasFatalFailure()) FAIL() << "byte " << i;
  }
  EXPECT_TRUE(file.read().ok());
}

TEST(PackFormat, OtherLengthsAreRefused) {
  IndexFile file(small_index());
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, kPackHeaderBytes - 1, kPackHeaderBytes, kPackHeaderBytes + 1,
                               file.size_bytes() - 1, file.size_bytes() + 1}) {
    file.write(file.front(), bytes);
    expect_refused(file.read(), file);
  }
}

TEST(PackFormat, WhatThisProgramDoesNotKnowIsNamed) {
  IndexFile file(small_index());
  const auto with = [&](auto change) {
    std::vector<std::byte> front = file.front();
    change(front);
    make_sums_right(front);
    file.write(front, file.size_bytes());
    return file.read();
  };
  expect_refused(with([](auto& front) { front[0] = std::byte{'s'}; }), file, "magic");
  expect_refused(with([](auto& front) { set_value(front, kVersionOffset, 2u); }), file,
                 "version 2, this program reads 1");
  expect_refused(with([](auto& front) { set_value(front, kLayoutOffset, 2u); }), file, "layout 2");
}

TEST(PackFormat, AnIndexThatContradictsItselfIsRefusedByName) {
  const std::vector<std::pair<const char*, std::function<void(PackIndex&)>>> faults = {
      {"layers are not in order", [](PackIndex& index) { index.layers[1].layer = index.layers[0].layer; }},
      {"overlap", [](PackIndex& index) { index.layers[0].record_offset = 0; }},
      {"aligned", [](PackIndex& index) { index.layers[1].record_offset += 64; }},
      {"no matrices", [](PackIndex& index) { index.layers[0].n_matrix = 0; }},
      {"no matrices", [](PackIndex& index) { index.layers[0].n_matrix = 5; }},
      {"shorter than its matrices", [](PackIndex& index) { index.layers[0].read_bytes = 0; }},
      {"a read does not end", [](PackIndex& index) { index.layers[0].read_bytes += 1; }},
      {"its records end at", [](PackIndex& index) { index.layers[1].record_stride_bytes = uint64_t{1} << 63; }},
      {"where the records end",
       [](PackIndex& index) { index.layers[1].n_expert = 1, index.layers[1].checksums.resize(4); }},
      {"not the name", [](PackIndex& index) { index.layers[0].segments[0].name = "x"; }},
      {"not the name",
       [](PackIndex& index) { index.layers[0].segments[0].name = layer_tensor(2, "ffn_gate_exps.weight"); }},
      {"not the name",
       [](PackIndex& index) { index.layers[0].segments[3].name = layer_tensor(1, "ffn_gate_exps.weight"); }},
      {"type 43", [](PackIndex& index) { index.layers[0].segments[0].type = GGML_TYPE_COUNT; }},
      {"given up", [](PackIndex& index) { index.layers[0].segments[0].type = static_cast<ggml_type>(4); }},
      {"shape", [](PackIndex& index) { index.layers[0].segments[0].ne0 = 33; }},
      {"shape", [](PackIndex& index) { index.layers[0].segments[0].ne1 = -1; }},
      {"agree", [](PackIndex& index) { index.layers[0].segments[0].ne1 = INT64_MAX; }},
      {"agree", [](PackIndex& index) { index.layers[0].segments[0].bytes -= 1; }},
      {"overlaps", [](PackIndex& index) { index.layers[0].segments[1].offset = 0; }},
      {"aligned", [](PackIndex& index) { index.layers[0].segments[1].offset += 1; }},
      {"outside its record", [](PackIndex& index) { index.layers[0].segments[3].offset = uint64_t{1} << 40; }},
      {"no native layout", [](PackIndex& index) { index.layers[0].segments[3].native = true; }},
  };
  for (const auto& [word, fault] : faults) {
    PackIndex index = small_index();
    IndexFile file(index);
    fault(index);
    file.write(encode_pack_front(index), file.size_bytes());
    SCOPED_TRACE(word);
    expect_refused(file.read(), file, word);
  }
}

// Edits that come with right checksums: a refusal, or an index whose ranges can be trusted.
TEST(PackFormat, RandomEditsAreRefusedOrConsistent) {
  IndexFile file(small_index());
  std::mt19937 random(20240229);
  const uint64_t index_bytes = value_at<uint64_t>(file.front(), kIndexBytesOffset);
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::byte> front = file.front();
    for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = kPackHeaderBytes + random() % index_bytes;
      constexpr std::byte kTelling[] = {std::byte{0}, std::byte{1}, std::byte{0x7f}, std::byte{0x80}, std::byte{0xff}};
      front[at] = random() % 2 ? kTelling[random() % 5] : static_cast<std::byte>(random());
    }
    make_sums_right(front);
    file.write(front, file.size_bytes());
    const auto index = file.read();
    if (!index) {
      expect_refused(index, file);
      continue;
    }
    ++accepted;
    uint64_t end = front.size();
    for (const PackLayer& layer : index->layers) {
      ASSERT_GE(layer.record_offset, end);
      end = layer.record_offset + layer.record_stride_bytes * layer.n_expert;
      ASSERT_LE(end, file.size_bytes());
      ASSERT_EQ(layer.checksums.size(), layer.n_expert * layer.segments.size());
      uint64_t segment_end = 0;
      for (const PackSegment& segment : layer.segments) {
        ASSERT_GE(segment.offset, segment_end);
        segment_end = segment.offset + segment.bytes;
        ASSERT_LE(segment_end, layer.record_stride_bytes);
        ASSERT_EQ(segment.bytes, ggml_row_size(segment.type, segment.ne0) * static_cast<uint64_t>(segment.ne1));
      }
    }
  }
  EXPECT_GT(accepted, 100) << "checksums and the tag may change freely";
}

TEST(PackFormat, LayoutsHaveNames) {
  for (const PackLayout layout : {PackLayout::kRaw, PackLayout::kNative})
    EXPECT_EQ(*parse_pack_layout(pack_layout_name(layout)), layout);
  const auto unknown = parse_pack_layout("fast");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().message(), "layout: wanted raw or native, given 'fast'");
}

}  // namespace
}  // namespace sluice::test
