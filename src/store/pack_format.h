// The format of a pack's experts file: every expert as one aligned record, so that a miss is one read. This part knows
// the header, the index and their checks; store/pack_writer.h makes packs, store/catalog.h opens them as models.
//
// A pack   is a folder: model.gguf (metadata and dense tensors; where experts would be, a hole) and experts.sluice.
// File     header (kPackHeaderBytes) | index | records, each at a multiple of kPackAlignBytes. docs/pack-format.md has
//          every field.
// Record   one expert of one layer: its matrices, each at a multiple of kPackSegmentAlignBytes, then its slices of the
//          per-expert bias and scale tensors. read_bytes covers the matrices; the rest is there so that a record is
//          whole.
// Checks   reading refuses whatever contradicts itself. After read_pack_index succeeded, records lie inside the file,
// do not
//          overlap, and segments lie inside their records.
// Sums     XXH3 (Yann Collet, xxHash 0.8): 64 bits for each segment of each record and for header and index, 128 bits
//          for identities.
// Units    bytes; little-endian.
// Errors   kBadFile with file and field, kShortRead, kDeviceError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "ggml.h"
#include "io/file.h"

namespace sluice {

inline constexpr char kPackModelName[] = "model.gguf";
inline constexpr char kPackExpertsName[] = "experts.sluice";
// In model.gguf: the identity of the experts file that belongs to it.
inline constexpr char kPackIdKey[] = "sluice.pack.id";

inline constexpr uint32_t kPackVersion = 1;
inline constexpr uint64_t kPackAlignBytes = 4096;
inline constexpr uint64_t kPackSegmentAlignBytes = 64;
inline constexpr uint64_t kPackHeaderBytes = 4096;
inline constexpr uint64_t kPackIndexBytesMax = uint64_t{1} << 30;
inline constexpr uint32_t kPackLayersMax = 1 << 16;
inline constexpr uint32_t kPackExpertsMax = 1 << 16;
inline constexpr uint32_t kPackSegmentsMax = 32;
inline constexpr size_t kPackTagBytesMax = 256;

enum class PackLayout : uint32_t {
  kRaw,     // matrices as in the GGUF: any machine
  kNative,  // matrices as this machine's ggml kernels like them; the tag says for which they are good
};
const char* pack_layout_name(PackLayout layout);  // "raw", "native"
Result<PackLayout> parse_pack_layout(const std::string& text);

// 128 bits that name content. Text: 32 hexadecimal digits.
struct PackId {
  uint64_t high = 0;
  uint64_t low = 0;

  std::string text() const;
  bool operator==(const PackId&) const = default;
};

struct PackSegment {
  std::string name;  // of the tensor that this is expert e's slice of
  ggml_type type = GGML_TYPE_COUNT;
  bool native = false;  // rearranged; still type, ne0 and ne1 of the original
  int64_t ne0 = 0;      // the slice is [ne0, ne1]
  int64_t ne1 = 0;
  uint64_t offset = 0;  // in the record
  uint64_t bytes = 0;
};

struct PackLayer {
  uint32_t layer = 0;
  uint32_t n_expert = 0;
  uint32_t n_matrix = 0;  // the first segments; the others are slices of side tensors
  uint64_t record_offset = 0;
  uint64_t record_stride_bytes = 0;
  uint64_t read_bytes = 0;  // from the record's start to the end of its last matrix
  std::vector<PackSegment> segments;
  std::vector<uint64_t> checksums;  // [n_expert][segments]

  uint64_t checksum(uint32_t expert, size_t segment) const { return checksums[expert * segments.size() + segment]; }
};

struct PackIndex {
  PackLayout layout = PackLayout::kRaw;
  PackId id;                              // of this pack's contents
  PackId source;                          // of the model it was made from: headers and sizes of its files
  std::string native_tag;                 // empty for kRaw
  uint64_t model_header_checksum = 0;     // of model.gguf up to its tensor data, with an id of zeros
  std::vector<uint64_t> dense_checksums;  // of the tensors of model.gguf that are no experts, in file order
  std::vector<PackLayer> layers;          // by rising layer and record_offset
};

// The bytes that header and index take, whatever their checksums are: where the first record may start.
uint64_t pack_front_bytes(const PackIndex& index);
// Header and index, padded with zeros to pack_front_bytes.
std::vector<std::byte> encode_pack_front(const PackIndex& index);

Result<PackIndex> read_pack_index(const File& file);

// The checksum of one segment.
uint64_t pack_checksum(const std::byte* data, uint64_t bytes);

}  // namespace sluice
