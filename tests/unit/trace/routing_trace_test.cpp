#include "trace/routing_trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

namespace sluice {
namespace {

class RoutingTraceFile : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path =
        (std::filesystem::temp_directory_path() / fmt::format("sluice_{}_{}.trace", test->name(), getpid())).string();
  }
  void TearDown() override { std::filesystem::remove(path); }

  // Writes records of random routing and keeps what was written.
  void write(const RoutingHeader& header, int n_record, uint32_t n_token_max, uint64_t seed = 1) {
    std::mt19937_64 random(seed);
    auto writer = RoutingTraceWriter::create(path, header);
    ASSERT_TRUE(writer.ok()) << writer.error().message();
    written = {};
    written.header = header;
    for (int i = 0; i < n_record; i++) {
      const auto layer = static_cast<uint32_t>(random() % header.n_layer);
      const uint32_t n_token = static_cast<uint32_t>(random() % n_token_max) + 1;
      std::vector<int32_t> ids(size_t{n_token} * header.top_k);
      std::vector<float> weights(header.has_weights ? ids.size() : 0);
      for (int32_t& id : ids) id = static_cast<int32_t>(random() % header.n_expert);
      for (float& weight : weights) weight = static_cast<float>(random() % 1000) / 1000;
      (*writer)->append(layer, ids, weights);
      written.records.push_back({layer, n_token, written.ids.size()});
      written.ids.insert(written.ids.end(), ids.begin(), ids.end());
      for (const float weight : weights) written.weights.push_back(half_from_float(weight));
    }
    const Status closed = (*writer)->close();
    ASSERT_TRUE(closed.ok()) << closed.error().message();
  }

  std::vector<uint8_t> bytes() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static void expect_prefix(const RoutingTrace& part, const RoutingTrace& whole) {
    ASSERT_LE(part.records.size(), whole.records.size());
    for (size_t i = 0; i < part.records.size(); i++) {
      EXPECT_EQ(part.records[i].layer, whole.records[i].layer);
      EXPECT_EQ(part.records[i].n_token, whole.records[i].n_token);
      EXPECT_EQ(part.records[i].first, whole.records[i].first);
    }
    ASSERT_LE(part.ids.size(), whole.ids.size());
    EXPECT_TRUE(std::equal(part.ids.begin(), part.ids.end(), whole.ids.begin()));
    ASSERT_LE(part.weights.size(), whole.weights.size());
    EXPECT_TRUE(std::equal(part.weights.begin(), part.weights.end(), whole.weights.begin()));
  }

  std::string path;
  RoutingTrace written;
};

RoutingHeader small_header() {
  return {
      .n_layer = 3, .n_expert = 16, .top_k = 2, .has_weights = true, .model = "tiny", .record_bytes = {0, 7, 1u << 30}};
}

TEST_F(RoutingTraceFile, ComesBackAsWritten) {
  RoutingHeader wide = small_header();
  wide.n_expert = 300;
  RoutingHeader bare = small_header();
  bare.has_weights = false;
  bare.model.clear();
  bare.n_expert = 256;
  for (const RoutingHeader& header : {small_header(), wide, bare}) {
    write(header, 500, 40);
    const auto trace = read_routing_trace(path);
    ASSERT_TRUE(trace.ok()) << trace.error().message();
    EXPECT_EQ(trace->header.n_layer, header.n_layer);
    EXPECT_EQ(trace->header.n_expert, header.n_expert);
    EXPECT_EQ(trace->header.top_k, header.top_k);
    EXPECT_EQ(trace->header.has_weights, header.has_weights);
    EXPECT_EQ(trace->header.model, header.model);
    EXPECT_EQ(trace->header.record_bytes, header.record_bytes);
    EXPECT_EQ(trace->records.size(), written.records.size());
    EXPECT_EQ(trace->ids, written.ids);
    EXPECT_EQ(trace->weights, written.weights);
    expect_prefix(*trace, written);
  }
}

// Larger than the writer's buffer, in records and in one record.
TEST_F(RoutingTraceFile, GoesThroughTheBufferManyTimes) {
  RoutingHeader header = small_header();
  header.has_weights = false;
  write(header, 40, 100000);
  ASSERT_GT(std::filesystem::file_size(path), 3u << 20);
  const auto trace = read_routing_trace(path);
  ASSERT_TRUE(trace.ok()) << trace.error().message();
  EXPECT_EQ(trace->ids, written.ids);
}

// The layout is a promise to other programs: these bytes were written by hand from the table in the header.
TEST_F(RoutingTraceFile, HasTheDocumentedLayout) {
  auto writer = RoutingTraceWriter::create(
      path, {.n_layer = 2, .n_expert = 300, .top_k = 2, .has_weights = true, .model = "ab", .record_bytes = {0, 513}});
  ASSERT_TRUE(writer.ok());
  (*writer)->append(1, std::vector<int32_t>{299, 4}, std::vector<float>{1.0F, 0.5F});
  ASSERT_TRUE((*writer)->close().ok());
  const std::vector<uint8_t> expected = {
      'S', 'L', 'U', 'I', 'C', 'E', 'R', 'T', 1, 0, 0, 0, 58, 0, 0, 0,  // magic, version, header bytes
      2,   0,   0,   0,   44,  1,   0,   0,   2, 0, 0, 0, 1,  0, 0, 0,  // n_layer, n_expert, top_k, flags
      2,   0,   0,   0,   0,   0,   0,   0,                             // name bytes, 0
      0,   0,   0,   0,   0,   0,   0,   0,   1, 2, 0, 0, 0,  0, 0, 0,  // record_bytes
      'a', 'b',                                                         // name
      1,   0,   0,   0,   1,   0,   0,   0,                             // layer, n_token
      43,  1,   4,   0,   0,   60,  0,   56,                            // ids, weights
      255, 255, 255, 255, 0,   0,   0,   0,   1, 0, 0, 0, 0,  0, 0, 0,  // end, number of records
  };
  const std::vector<uint8_t> found = bytes();
  ASSERT_EQ(found.size(), expected.size() + 8);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found.begin()));
}

TEST_F(RoutingTraceFile, EmptyIsATraceToo) {
  write(small_header(), 0, 1);
  const auto trace = read_routing_trace(path);
  ASSERT_TRUE(trace.ok());
  EXPECT_TRUE(trace->records.empty());
}

TEST_F(RoutingTraceFile, EveryCutIsAnErrorAndCanBeSalvaged) {
  write(small_header(), 12, 4);
  const std::vector<uint8_t> whole = bytes();
  const size_t header_bytes = 40 + 3 * 8 + 4;
  size_t n_record_max = 0;
  for (size_t size = 0; size < whole.size(); size++) {
    // A copy of its own size, so that the address sanitizer sees any byte read behind it.
    const std::vector<uint8_t> cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    const auto strict = parse_routing_trace(cut);
    ASSERT_FALSE(strict.ok()) << size;
    EXPECT_EQ(strict.error().code, ErrorCode::kBadFile);
    EXPECT_EQ(strict.error().text.find('\n'), std::string::npos);
    const auto salvaged = parse_routing_trace(cut, TraceEnd::kSalvage);
    ASSERT_EQ(salvaged.ok(), size >= header_bytes) << size;
    if (!salvaged) continue;
    expect_prefix(*salvaged, written);
    EXPECT_GE(salvaged->records.size(), n_record_max);
    n_record_max = salvaged->records.size();
  }
  EXPECT_EQ(n_record_max, written.records.size());
}

TEST_F(RoutingTraceFile, EveryFlippedBitIsAnError) {
  write(small_header(), 12, 4);
  const std::vector<uint8_t> whole = bytes();
  for (size_t at = 0; at < whole.size(); at++) {
    for (int bit = 0; bit < 8; bit++) {
      std::vector<uint8_t> damaged = whole;
      damaged[at] = static_cast<uint8_t>(damaged[at] ^ (1 << bit));
      EXPECT_FALSE(parse_routing_trace(damaged).ok()) << at << " bit " << bit;
      // Nothing checks the hash here: whatever comes back must be inside the header's bounds.
      const auto salvaged = parse_routing_trace(damaged, TraceEnd::kSalvage);
      if (!salvaged) continue;
      for (const RoutingRecord& record : salvaged->records) {
        ASSERT_LT(record.layer, salvaged->header.n_layer);
        for (const uint16_t id : salvaged->ids_of(record)) ASSERT_LT(id, salvaged->header.n_expert);
      }
    }
  }
}

TEST_F(RoutingTraceFile, RandomDamageNeverCrashes) {
  write(small_header(), 12, 4);
  const std::vector<uint8_t> whole = bytes();
  std::mt19937_64 random(9);
  for (int round = 0; round < 20000; round++) {
    std::vector<uint8_t> damaged = whole;
    for (uint64_t n = random() % 8 + 1; n > 0; n--) {
      const size_t at = random() % damaged.size();
      switch (random() % 4) {
        case 0: damaged[at] = static_cast<uint8_t>(random()); break;
        case 1: damaged[at] = 0xFF; break;
        case 2: damaged.erase(damaged.begin() + static_cast<ptrdiff_t>(at)); break;
        default: damaged.insert(damaged.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random())); break;
      }
    }
    EXPECT_EQ(parse_routing_trace(damaged).ok(), damaged == whole) << round;
    (void)parse_routing_trace(damaged, TraceEnd::kSalvage);
  }
}

TEST_F(RoutingTraceFile, TrailingBytesAreAnError) {
  write(small_header(), 3, 4);
  std::vector<uint8_t> longer = bytes();
  longer.push_back(0);
  EXPECT_FALSE(parse_routing_trace(longer).ok());
}

TEST(RoutingTraceErrors, NameWhatIsWrong) {
  const auto missing = read_routing_trace("/nonexistent/x.trace");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  const auto folder = read_routing_trace("/");
  ASSERT_FALSE(folder.ok());
  EXPECT_EQ(folder.error().code, ErrorCode::kDeviceError);
  EXPECT_EQ(parse_routing_trace(std::vector<uint8_t>(100, 'x')).error().text,
            "routing trace: does not begin with SLUICERT");

  RoutingHeader header = small_header();
  header.top_k = 17;
  EXPECT_EQ(RoutingTraceWriter::create("/tmp/never", header).error().text, "top_k: wanted 1 to 16, given 17");
  header = small_header();
  header.n_layer = 5000;
  EXPECT_EQ(check_routing_header(header).error().text, "n_layer: wanted 1 to 4096, given 5000");
  header = small_header();
  header.record_bytes.pop_back();
  EXPECT_FALSE(check_routing_header(header).ok());
  EXPECT_EQ(RoutingTraceWriter::create("/nonexistent/x.trace", small_header()).error().code, ErrorCode::kDeviceError);
}

TEST(RoutingTraceErrors, AFullDiskIsToldAtTheEnd) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  auto writer = RoutingTraceWriter::create("/dev/full", small_header());
  ASSERT_TRUE(writer.ok());
  const std::vector<int32_t> ids(200000, 1);
  for (int i = 0; i < 5; i++) (*writer)->append(0, ids, std::vector<float>(ids.size()));
  const Status closed = (*writer)->close();
  ASSERT_FALSE(closed.ok());
  EXPECT_EQ(closed.error().code, ErrorCode::kDeviceError);
  EXPECT_EQ(closed.error().system_error, ENOSPC);
}

TEST_F(RoutingTraceFile, MisuseOfTheWriterStops) {
  auto writer = RoutingTraceWriter::create(path, small_header());
  ASSERT_TRUE(writer.ok());
  const std::vector<float> weights(2);
  EXPECT_DEATH((*writer)->append(3, std::vector<int32_t>{0, 1}, weights), "layer 3 of 3");
  EXPECT_DEATH((*writer)->append(0, std::vector<int32_t>{0, 16}, weights), "expert 16 of 16");
  EXPECT_DEATH((*writer)->append(0, std::vector<int32_t>{0, -1}, weights), "expert -1 of 16");
  EXPECT_DEATH((*writer)->append(0, std::vector<int32_t>{0}, weights), "1 ids");
  EXPECT_DEATH((*writer)->append(0, std::vector<int32_t>{0, 1}), "0 weights");
}

TEST(RoutingTraceForwards, BeginWhereTheLayerDoesNotRise) {
  RoutingTrace trace;
  for (const uint32_t layer : {1U, 2U, 5U, 1U, 2U, 2U, 5U}) trace.records.push_back({layer, 1, 0});
  std::vector<size_t> starts;
  for (size_t i = 0; i < trace.records.size(); i++) {
    if (trace.starts_forward(i)) starts.push_back(i);
  }
  EXPECT_EQ(starts, (std::vector<size_t>{0, 3, 5}));
}

TEST(RawRouting, IsReadByTokenAndLayer) {
  const RoutingHeader shape{.n_layer = 2, .n_expert = 4, .top_k = 2, .model = "", .record_bytes = {}};
  const std::vector<uint8_t> bytes = {0, 1, 2, 3, 3, 2, 1, 0};
  const auto trace = parse_raw_routing(bytes, shape);
  ASSERT_TRUE(trace.ok());
  ASSERT_EQ(trace->records.size(), 4U);
  EXPECT_EQ(trace->records[1].layer, 1U);
  EXPECT_EQ(trace->ids_of(trace->records[1])[0], 2);
  EXPECT_EQ(trace->ids_of(trace->records[2])[0], 3);
  EXPECT_TRUE(trace->starts_forward(2));
  EXPECT_FALSE(trace->starts_forward(3));

  EXPECT_EQ(parse_raw_routing(std::span(bytes).first(7), shape).error().text,
            "raw trace: wanted a multiple of 2 x 2 bytes, the file has 7");
  EXPECT_EQ(parse_raw_routing(std::vector<uint8_t>{0, 1, 2, 4}, shape).error().text, "raw trace: expert 4 of 4 at 3");
  RoutingHeader wide = shape;
  wide.n_expert = 257;
  EXPECT_FALSE(parse_raw_routing(bytes, wide).ok());
}

TEST(Half, GoesThroughEveryValue) {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = float_from_half(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(float_from_half(half_from_float(value))));
    } else {
      ASSERT_EQ(half_from_float(value), half);
    }
  }
}

TEST(Half, RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; bits++) {
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const float middle = (float_from_half(low) + float_from_half(high)) / 2;  // exact in binary32
    ASSERT_EQ(half_from_float(middle), (bits & 1) == 0 ? low : high);
    ASSERT_EQ(half_from_float(std::nextafterf(middle, 0.0F)), low);
    ASSERT_EQ(half_from_float(std::nextafterf(middle, 1e9F)), high);
    ASSERT_EQ(half_from_float(-middle), half_from_float(middle) | 0x8000);
  }
  EXPECT_EQ(half_from_float(65519.0F), 0x7BFF);
  EXPECT_EQ(half_from_float(65520.0F), 0x7C00);
  EXPECT_EQ(half_from_float(std::numeric_limits<float>::infinity()), 0x7C00);
}

}  // namespace
}  // namespace sluice
