// Routing traces: which experts a model's router chose, written while the engine runs and replayed later
// (policy/replay.h) to choose a policy and a pool size from a user's own work. Holds ids and, if wanted, the router's
// weights; no tokens and no text.
//
// A record is one layer call: one layer of one forward (micro-batch), with all its tokens. Records stand in the order
// in which the layers ran. A forward is not marked: it begins at the first record and at every record whose layer
// number is not above that of the record before it (starts_forward).
//
// File layout, little-endian, nothing padded. L = n_layer, K = top_k, I = 1 byte when n_expert <= 256, else 2.
//
//   header   offset  bytes  field
//            0       8      magic "SLUICERT"
//            8       4      version, 1
//            12      4      header bytes: where the first record is, 40 + 8 L + N
//            16      4      n_layer, 1 .. 4096; dense layers count
//            20      4      n_expert, 1 .. 65536
//            24      4      top_k, 1 .. n_expert
//            28      4      flags; bit 0: records carry weights; the others are 0
//            32      4      N, bytes of the model's name, 0 .. 1024
//            36      4      0
//            40      8 L    record_bytes [n_layer]: one expert of that layer in the model's file; 0: dense or unknown
//            40+8L   N      the model's name, without terminator
//   record   0       4      layer, < n_layer
//            4       4      n_token, 1 .. 2^31 - 1
//            8       n K I  ids [n_token][top_k], each < n_expert
//            ...     n K 2  weights [n_token][top_k], IEEE binary16; only with flag bit 0
//   end      0       4      0xFFFFFFFF
//            4       4      0
//            8       8      number of records
//            16      8      XXH3 (64 bits, seed 0) of all bytes before this field; the file ends behind it
//
// Errors   reading: kNotFound, kDeviceError, kBadFile with the offset of what is wrong. No length is believed before it
//          was compared with what is there, and the end's hash leaves no changed byte unnoticed.
// Threads  thread-compatible.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace sluice {

inline constexpr uint32_t kTraceLayersMax = 4096;
inline constexpr uint32_t kTraceExpertsMax = 65536;
inline constexpr uint32_t kTraceNameBytesMax = 1024;
inline constexpr uint32_t kTraceTokensMax = 0x7FFFFFFF;

struct RoutingHeader {
  uint32_t n_layer = 0;
  uint32_t n_expert = 0;
  uint32_t top_k = 0;
  bool has_weights = false;
  std::string model;
  std::vector<uint64_t> record_bytes;  // [n_layer], or empty when nothing is known
};

// kBadArgument when a field is outside the format's bounds.
Status check_routing_header(const RoutingHeader& header);

struct RoutingRecord {
  uint32_t layer = 0;
  uint32_t n_token = 0;
  uint64_t first = 0;  // of its n_token * top_k entries in RoutingTrace::ids and weights
};

// A whole trace in memory.
struct RoutingTrace {
  RoutingHeader header;
  std::vector<RoutingRecord> records;
  std::vector<uint16_t> ids;      // [n_token][top_k] of all records, one after another
  std::vector<uint16_t> weights;  // as ids, binary16 bits; empty without weights

  std::span<const uint16_t> ids_of(const RoutingRecord& record) const {
    return std::span(ids).subspan(record.first, uint64_t{record.n_token} * header.top_k);
  }
  // Whether records[index] is the first layer call of a forward.
  bool starts_forward(size_t index) const { return index == 0 || records[index].layer <= records[index - 1].layer; }
};

enum class TraceEnd {
  kRequire,  // a file without its end, or with a wrong one, is an error
  kSalvage,  // of a file that was cut off (a killed run), the whole records before the cut; the hash is not checked
             // then
};

Result<RoutingTrace> parse_routing_trace(std::span<const uint8_t> bytes, TraceEnd end = TraceEnd::kRequire);
Result<RoutingTrace> read_routing_trace(const std::string& path, TraceEnd end = TraceEnd::kRequire);

// Bare bytes [token][layer][top_k], every token a forward of its own: what a script dumps most easily.
// `shape` gives n_layer, top_k and n_expert (<= 256).
Result<RoutingTrace> parse_raw_routing(std::span<const uint8_t> bytes, const RoutingHeader& shape);
Result<RoutingTrace> read_raw_routing(const std::string& path, const RoutingHeader& shape);

// Appends records to a new file. Made for the engine's hot path: append() copies into a buffer taken at start, and only
// a full buffer (256 KiB) costs a write. A write that fails must not stop the run it observes: the writer keeps the
// first error, drops everything after it, and close() returns it.
class RoutingTraceWriter {
 public:
  // Replaces what is at `path`. kBadArgument, or kDeviceError with the reason.
  static Result<std::unique_ptr<RoutingTraceWriter>> create(const std::string& path, const RoutingHeader& header);

  RoutingTraceWriter(const RoutingTraceWriter&) = delete;
  RoutingTraceWriter& operator=(const RoutingTraceWriter&) = delete;
  // Closes; an error is lost then.
  ~RoutingTraceWriter();

  // One layer call. `ids` is [n_token][top_k], `weights` likewise, or empty where the header says so. Ids are those of
  // the router, which chooses below n_expert: another id, a layer out of range or a wrong length asserts.
  void append(uint32_t layer, std::span<const int32_t> ids, std::span<const float> weights = {});

  // Writes the end. The first error of all writes, if there was one. Nothing may be appended afterwards.
  Status close();

 private:
  RoutingTraceWriter() = default;
  void put(const void* data, size_t bytes);
  template <typename T>
  void put_value(T value) {
    put(&value, sizeof(value));
  }
  void flush();

  struct Hash;  // keeps the hash library out of this header
  struct HashDeleter {
    void operator()(Hash* hash) const;
  };

  std::string path_;
  RoutingHeader header_;
  FILE* file_ = nullptr;
  std::vector<uint8_t> buffer_;
  size_t buffered_bytes_ = 0;
  std::unique_ptr<Hash, HashDeleter> hash_;
  uint64_t n_record_ = 0;
  Status status_;
};

// IEEE binary16, rounded to nearest, ties to even; too large becomes infinity.
uint16_t half_from_float(float value);
float float_from_half(uint16_t half);

}  // namespace sluice
