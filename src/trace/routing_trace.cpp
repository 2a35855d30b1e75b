#include "trace/routing_trace.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>

namespace sluice {

static_assert(std::endian::native == std::endian::little, "the format is written as it lies in memory");

namespace {

constexpr char kMagic[8] = {'S', 'L', 'U', 'I', 'C', 'E', 'R', 'T'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kFlagWeights = 1;
constexpr uint32_t kEndMark = 0xFFFFFFFF;
constexpr size_t kFixedHeaderBytes = 40;
constexpr size_t kRecordHeaderBytes = 8;
constexpr size_t kEndBytes = 24;
constexpr size_t kBufferBytes = 256 * 1024;

// Reads values off the front of a span. The caller compares remaining() with what it wants first.
class Cursor {
 public:
  explicit Cursor(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  uint64_t offset() const { return offset_; }
  uint64_t remaining() const { return bytes_.size() - offset_; }
  const uint8_t* here() const { return bytes_.data() + offset_; }
  void skip(uint64_t bytes) {
    SLUICE_ASSERT(bytes <= remaining(), "{} of {} bytes", bytes, remaining());
    offset_ += bytes;
  }
  template <typename T>
  T take() {
    T value;
    const uint8_t* from = here();
    skip(sizeof(T));
    std::memcpy(&value, from, sizeof(T));
    return value;
  }

 private:
  std::span<const uint8_t> bytes_;
  uint64_t offset_ = 0;
};

size_t id_bytes(const RoutingHeader& header) {
  return header.n_expert <= 256 ? 1 : 2;
}

template <typename... Args>
Error bad_trace(fmt::format_string<Args...> format, Args&&... args) {
  return make_error(ErrorCode::kBadFile, "routing trace: {}", fmt::format(format, std::forward<Args>(args)...));
}

Result<RoutingHeader> take_header(Cursor& cursor) {
  if (cursor.remaining() < kFixedHeaderBytes) {
    return bad_trace("wanted a header of {} bytes, the file has {}", kFixedHeaderBytes, cursor.remaining());
  }
  if (std::memcmp(cursor.here(), kMagic, sizeof(kMagic)) != 0) return bad_trace("does not begin with SLUICERT");
  cursor.skip(sizeof(kMagic));
  const auto version = cursor.take<uint32_t>();
  if (version != kVersion) return bad_trace("version {}, this program reads {}", version, kVersion);
  const auto header_bytes = cursor.take<uint32_t>();

  RoutingHeader header;
  header.n_layer = cursor.take<uint32_t>();
  header.n_expert = cursor.take<uint32_t>();
  header.top_k = cursor.take<uint32_t>();
  const auto flags = cursor.take<uint32_t>();
  const auto name_bytes = cursor.take<uint32_t>();
  const auto zero = cursor.take<uint32_t>();
  if ((flags & ~kFlagWeights) != 0 || zero != 0) return bad_trace("unknown flags {:#x}, {:#x}", flags, zero);
  header.has_weights = (flags & kFlagWeights) != 0;
  if (name_bytes > kTraceNameBytesMax) return bad_trace("a name of {} bytes", name_bytes);
  if (const Status status = check_routing_header(header); !status) return bad_trace("{}", status.error().text);

  const uint64_t rest_bytes = uint64_t{header.n_layer} * 8 + name_bytes;
  if (header_bytes != kFixedHeaderBytes + rest_bytes) {
    return bad_trace("wanted {} header bytes, the field says {}", kFixedHeaderBytes + rest_bytes, header_bytes);
  }
  if (cursor.remaining() < rest_bytes) {
    return bad_trace("wanted a header of {} bytes, the file has {}", header_bytes,
                     cursor.offset() + cursor.remaining());
  }
  header.record_bytes.resize(header.n_layer);
  for (uint64_t& bytes : header.record_bytes) bytes = cursor.take<uint64_t>();
  header.model.assign(reinterpret_cast<const char*>(cursor.here()), name_bytes);
  cursor.skip(name_bytes);
  return header;
}

// Appends the record at the cursor to the trace. `trace` is unchanged on error.
Status take_record(Cursor& cursor, RoutingTrace& trace) {
  const uint64_t start = cursor.offset();
  RoutingRecord record;
  record.layer = cursor.take<uint32_t>();
  record.n_token = cursor.take<uint32_t>();
  record.first = trace.ids.size();
  const RoutingHeader& header = trace.header;
  if (record.layer >= header.n_layer) {
    return bad_trace("record at {}: layer {} of {}", start, record.layer, header.n_layer);
  }
  if (record.n_token == 0 || record.n_token > kTraceTokensMax) {
    return bad_trace("record at {}: {} tokens", start, record.n_token);
  }
  // Below 2^31 * 2^16 * 4: no overflow.
  const uint64_t n_id = uint64_t{record.n_token} * header.top_k;
  const uint64_t wanted = n_id * (id_bytes(header) + (header.has_weights ? 2 : 0));
  if (cursor.remaining() < wanted) {
    return bad_trace("record at {}: wanted {} bytes for {} tokens, the file has {}", start, wanted, record.n_token,
                     cursor.remaining());
  }
  trace.ids.resize(record.first + n_id);
  for (uint64_t i = 0; i < n_id; i++) {
    const uint16_t id = id_bytes(header) == 1 ? cursor.take<uint8_t>() : cursor.take<uint16_t>();
    if (id >= header.n_expert) {
      trace.ids.resize(record.first);
      return bad_trace("record at {}: expert {} of {}", start, id, header.n_expert);
    }
    trace.ids[record.first + i] = id;
  }
  if (header.has_weights) {
    trace.weights.resize(record.first + n_id);
    std::memcpy(trace.weights.data() + record.first, cursor.here(), n_id * 2);
    cursor.skip(n_id * 2);
  }
  trace.records.push_back(record);
  return {};
}

Status check_end(Cursor& cursor, std::span<const uint8_t> bytes, uint64_t n_record) {
  const uint64_t start = cursor.offset();
  if (cursor.remaining() != kEndBytes) {
    return bad_trace("end at {}: wanted {} bytes up to the file's end, found {}", start, kEndBytes, cursor.remaining());
  }
  cursor.skip(4);
  const auto zero = cursor.take<uint32_t>();
  const auto counted = cursor.take<uint64_t>();
  if (zero != 0 || counted != n_record) {
    return bad_trace("end at {}: says {} records, there are {}", start, counted, n_record);
  }
  const uint64_t wanted = XXH3_64bits(bytes.data(), cursor.offset());
  const auto found = cursor.take<uint64_t>();
  if (found != wanted) return bad_trace("contents do not match the hash in the end ({:016x}, {:016x})", wanted, found);
  return {};
}

Result<std::vector<uint8_t>> read_file(const std::string& path) {
  FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    const int error = errno;
    return make_system_error(error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kDeviceError, error,
                             "{}: cannot open routing trace", path);
  }
  std::vector<uint8_t> bytes;
  size_t used = 0;
  errno = 0;
  do {
    bytes.resize(std::max(kBufferBytes, 2 * used));
    used += std::fread(bytes.data() + used, 1, bytes.size() - used, file);
  } while (used == bytes.size());
  const bool failed = std::ferror(file) != 0;
  const int error = errno;
  std::fclose(file);
  if (failed) return make_system_error(ErrorCode::kDeviceError, error, "{}: cannot read routing trace", path);
  bytes.resize(used);
  return bytes;
}

template <typename Parse>
Result<RoutingTrace> parse_file(const std::string& path, Parse parse) {
  const auto bytes = read_file(path);
  if (!bytes) return bytes.error();
  auto trace = parse(*bytes);
  if (!trace) return Error{trace.error().code, fmt::format("{}: {}", path, trace.error().text), 0};
  return trace;
}

}  // namespace

Status check_routing_header(const RoutingHeader& header) {
  const auto outside = [](const char* field, uint64_t value, uint64_t max) -> Status {
    return make_error(ErrorCode::kBadArgument, "{}: wanted 1 to {}, given {}", field, max, value);
  };
  if (header.n_layer == 0 || header.n_layer > kTraceLayersMax)
    return outside("n_layer", header.n_layer, kTraceLayersMax);
  if (header.n_expert == 0 || header.n_expert > kTraceExpertsMax) {
    return outside("n_expert", header.n_expert, kTraceExpertsMax);
  }
  if (header.top_k == 0 || header.top_k > header.n_expert) return outside("top_k", header.top_k, header.n_expert);
  if (header.model.size() > kTraceNameBytesMax) {
    return make_error(ErrorCode::kBadArgument, "model name: wanted up to {} bytes, given {}", kTraceNameBytesMax,
                      header.model.size());
  }
  if (!header.record_bytes.empty() && header.record_bytes.size() != header.n_layer) {
    return make_error(ErrorCode::kBadArgument, "record_bytes: wanted {} layers, given {}", header.n_layer,
                      header.record_bytes.size());
  }
  return {};
}

Result<RoutingTrace> parse_routing_trace(std::span<const uint8_t> bytes, TraceEnd end) {
  Cursor cursor(bytes);
  auto header = take_header(cursor);
  if (!header) return header.error();
  RoutingTrace trace;
  trace.header = std::move(*header);

  Status status;
  while (status) {
    uint32_t first_word = 0;
    if (cursor.remaining() < kRecordHeaderBytes) {
      status = bad_trace("ends at {} without its end record: the run that wrote it did not close it", bytes.size());
      break;
    }
    std::memcpy(&first_word, cursor.here(), sizeof(first_word));
    if (first_word == kEndMark) {
      status = check_end(cursor, bytes, trace.records.size());
      break;
    }
    status = take_record(cursor, trace);
  }
  if (!status && end == TraceEnd::kRequire) return status.error();
  return trace;
}

Result<RoutingTrace> read_routing_trace(const std::string& path, TraceEnd end) {
  return parse_file(path, [&](const std::vector<uint8_t>& bytes) { return parse_routing_trace(bytes, end); });
}

Result<RoutingTrace> parse_raw_routing(std::span<const uint8_t> bytes, const RoutingHeader& shape) {
  if (const Status status = check_routing_header(shape); !status) return status.error();
  if (shape.n_expert > 256) {
    return make_error(ErrorCode::kBadArgument, "raw trace: ids are bytes, wanted up to 256 experts, given {}",
                      shape.n_expert);
  }
  const uint64_t token_bytes = uint64_t{shape.n_layer} * shape.top_k;
  if (bytes.size() % token_bytes != 0) {
    return make_error(ErrorCode::kBadFile, "raw trace: wanted a multiple of {} x {} bytes, the file has {}",
                      shape.n_layer, shape.top_k, bytes.size());
  }
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [&](uint8_t id) { return id >= shape.n_expert; });
  if (bad != bytes.end()) {
    return make_error(ErrorCode::kBadFile, "raw trace: expert {} of {} at {}", *bad, shape.n_expert,
                      bad - bytes.begin());
  }
  RoutingTrace trace;
  trace.header = shape;
  trace.header.has_weights = false;
  trace.ids.assign(bytes.begin(), bytes.end());
  trace.records.reserve(bytes.size() / shape.top_k);
  for (uint64_t first = 0; first < bytes.size(); first += shape.top_k) {
    const auto layer = static_cast<uint32_t>(first / shape.top_k % shape.n_layer);
    trace.records.push_back({layer, 1, first});
  }
  return trace;
}

Result<RoutingTrace> read_raw_routing(const std::string& path, const RoutingHeader& shape) {
  return parse_file(path, [&](const std::vector<uint8_t>& bytes) { return parse_raw_routing(bytes, shape); });
}

struct RoutingTraceWriter::Hash {
  XXH3_state_t state;
};

void RoutingTraceWriter::HashDeleter::operator()(Hash* hash) const {
  delete hash;
}

Result<std::unique_ptr<RoutingTraceWriter>> RoutingTraceWriter::create(const std::string& path,
                                                                       const RoutingHeader& header) {
  if (const Status status = check_routing_header(header); !status) return status.error();
  std::unique_ptr<RoutingTraceWriter> writer(new RoutingTraceWriter());
  writer->path_ = path;
  writer->header_ = header;
  writer->header_.record_bytes.resize(header.n_layer, 0);
  writer->file_ = std::fopen(path.c_str(), "wb");
  if (writer->file_ == nullptr) {
    return make_system_error(ErrorCode::kDeviceError, errno, "{}: cannot create routing trace", path);
  }
  std::setvbuf(writer->file_, nullptr, _IONBF, 0);
  writer->buffer_.resize(kBufferBytes);
  writer->hash_.reset(new Hash());
  XXH3_64bits_reset(&writer->hash_->state);

  const auto name_bytes = static_cast<uint32_t>(header.model.size());
  writer->put(kMagic, sizeof(kMagic));
  writer->put_value(kVersion);
  writer->put_value(static_cast<uint32_t>(kFixedHeaderBytes) + header.n_layer * 8 + name_bytes);
  writer->put_value(header.n_layer);
  writer->put_value(header.n_expert);
  writer->put_value(header.top_k);
  writer->put_value(header.has_weights ? kFlagWeights : uint32_t{0});
  writer->put_value(name_bytes);
  writer->put_value(uint32_t{0});
  for (const uint64_t bytes : writer->header_.record_bytes) writer->put_value(bytes);
  writer->put(header.model.data(), name_bytes);
  return writer;
}

RoutingTraceWriter::~RoutingTraceWriter() {
  if (file_ != nullptr) (void)close();
}

void RoutingTraceWriter::append(uint32_t layer, std::span<const int32_t> ids, std::span<const float> weights) {
  SLUICE_ASSERT(file_ != nullptr, "append to a closed routing trace");
  SLUICE_ASSERT(layer < header_.n_layer, "layer {} of {}", layer, header_.n_layer);
  const uint64_t n_token = ids.size() / header_.top_k;
  SLUICE_ASSERT(n_token * header_.top_k == ids.size() && n_token >= 1 && n_token <= kTraceTokensMax,
                "{} ids with top {}", ids.size(), header_.top_k);
  SLUICE_ASSERT(weights.size() == (header_.has_weights ? ids.size() : 0), "{} weights for {} ids", weights.size(),
                ids.size());
  put_value(layer);
  put_value(static_cast<uint32_t>(n_token));
  for (const int32_t id : ids) {
    SLUICE_ASSERT(id >= 0 && static_cast<uint32_t>(id) < header_.n_expert, "expert {} of {}", id, header_.n_expert);
    if (header_.n_expert <= 256) {
      put_value(static_cast<uint8_t>(id));
    } else {
      put_value(static_cast<uint16_t>(id));
    }
  }
  for (const float weight : weights) put_value(half_from_float(weight));
  n_record_++;
}

Status RoutingTraceWriter::close() {
  SLUICE_ASSERT(file_ != nullptr, "a routing trace closed twice");
  put_value(kEndMark);
  put_value(uint32_t{0});
  put_value(n_record_);
  flush();
  put_value(static_cast<uint64_t>(XXH3_64bits_digest(&hash_->state)));
  flush();
  if (std::fclose(file_) != 0 && status_) {
    status_ = make_system_error(ErrorCode::kDeviceError, errno, "{}: cannot close routing trace", path_);
  }
  file_ = nullptr;
  return status_;
}

void RoutingTraceWriter::put(const void* data, size_t bytes) {
  // Everything put is small: a value, or a name of bounded length.
  if (buffer_.size() - buffered_bytes_ < bytes) flush();
  if (bytes != 0) std::memcpy(buffer_.data() + buffered_bytes_, data, bytes);
  buffered_bytes_ += bytes;
}

void RoutingTraceWriter::flush() {
  if (status_) {
    XXH3_64bits_update(&hash_->state, buffer_.data(), buffered_bytes_);
    if (std::fwrite(buffer_.data(), 1, buffered_bytes_, file_) != buffered_bytes_) {
      status_ = make_system_error(ErrorCode::kDeviceError, errno, "{}: cannot write routing trace", path_);
    }
  }
  buffered_bytes_ = 0;
}

uint16_t half_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;   // not a number
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                       // subnormal or zero: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24F;
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyintf(scaled)));
  }
  const uint32_t rebased = magnitude - (uint32_t{127 - 15} << 23);
  const uint32_t half_up = 0x0FFF + ((rebased >> 13) & 1);  // the carry may run into the exponent, as it should
  return static_cast<uint16_t>(sign | ((rebased + half_up) >> 13));
}

float float_from_half(uint16_t half) {
  const uint32_t exponent = (half >> 10) & 0x1F;
  const uint32_t fraction = half & 0x3FF;
  float magnitude = 0;
  if (exponent == 0) {
    magnitude = static_cast<float>(fraction) * 0x1p-24F;
  } else if (exponent == 0x1F) {
    magnitude = std::bit_cast<float>(0x7F800000 | (fraction << 13));
  } else {
    magnitude = std::bit_cast<float>(((exponent + 127 - 15) << 23) | (fraction << 13));
  }
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace sluice
