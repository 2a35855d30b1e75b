#include "store/pack_format.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>

#include "base/bytes.h"
#include "store/expert_tensor.h"
#include "store/gguf_header.h"

namespace sluice {

namespace {

constexpr char kMagic[8] = {'S', 'L', 'U', 'I', 'C', 'E', 'P', 'K'};
constexpr size_t kNameBytesMax = GGML_MAX_NAME;

class Writer {
 public:
  template <typename T>
  void put(T value) {
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  void put_text(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    for (const char c : text) bytes_.push_back(static_cast<std::byte>(c));
  }
  void put_bytes(const char* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) bytes_.push_back(static_cast<std::byte>(data[i]));
  }
  void pad_to(uint64_t bytes) { bytes_.resize(bytes); }
  uint64_t size() const { return bytes_.size(); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// Never reads behind the end: what is asked for there is zero, and `ok` says so.
class Reader {
 public:
  Reader(const std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

  template <typename T>
  T get() {
    uint64_t value = 0;
    if (!has(sizeof(T))) return 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(data_[position_ + i]) << (8 * i);
    position_ += sizeof(T);
    return static_cast<T>(value);
  }
  std::string get_text(size_t bytes_max) {
    const uint32_t bytes = get<uint32_t>();
    if (bytes > bytes_max) ok_ = false;
    if (!has(bytes)) return {};
    std::string text(reinterpret_cast<const char*>(data_) + position_, bytes);
    position_ += bytes;
    return text;
  }
  // Whether so many bytes are left; a reader that has failed has none.
  bool has(uint64_t bytes) {
    ok_ = ok_ && bytes <= bytes_ - position_;
    return ok_;
  }
  bool ok() const { return ok_; }
  bool at_end() const { return position_ == bytes_; }

 private:
  const std::byte* data_;
  uint64_t bytes_;
  uint64_t position_ = 0;
  bool ok_ = true;
};

void put_id(Writer& writer, const PackId& id) {
  writer.put(id.high);
  writer.put(id.low);
}

PackId get_id(Reader& reader) {
  const uint64_t high = reader.get<uint64_t>();
  return {high, reader.get<uint64_t>()};
}

std::vector<std::byte> encode_index(const PackIndex& index) {
  Writer out;
  out.put_text(index.native_tag);
  out.put(index.model_header_checksum);
  out.put(static_cast<uint64_t>(index.dense_checksums.size()));
  for (const uint64_t checksum : index.dense_checksums) out.put(checksum);
  out.put(static_cast<uint32_t>(index.layers.size()));
  for (const PackLayer& layer : index.layers) {
    out.put(layer.layer);
    out.put(layer.n_expert);
    out.put(layer.n_matrix);
    out.put(static_cast<uint32_t>(layer.segments.size()));
    out.put(layer.record_offset);
    out.put(layer.record_stride_bytes);
    out.put(layer.read_bytes);
    for (const PackSegment& segment : layer.segments) {
      out.put_text(segment.name);
      out.put(static_cast<uint32_t>(segment.type));
      out.put(static_cast<uint32_t>(segment.native));
      out.put(static_cast<uint64_t>(segment.ne0));
      out.put(static_cast<uint64_t>(segment.ne1));
      out.put(segment.offset);
      out.put(segment.bytes);
    }
    SLUICE_ASSERT(layer.checksums.size() == layer.n_expert * layer.segments.size(), "layer {}: {} checksums",
                  layer.layer, layer.checksums.size());
    for (const uint64_t checksum : layer.checksums) out.put(checksum);
  }
  return std::move(out.bytes());
}

// Padding: whoever gives it a meaning gives the file another version.
bool all_zeros(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

template <typename... Args>
Error bad_pack(const File& file, fmt::format_string<Args...> format, Args&&... args) {
  return make_error(ErrorCode::kBadFile, "{}: {}", file.path(), fmt::format(format, std::forward<Args>(args)...));
}

Status check_segment(const File& file, const PackLayer& layer, const PackSegment& segment, bool is_matrix,
                     uint64_t begin) {
  const auto refuse = [&](const char* what) {
    return bad_pack(file, "layer {}, segment '{}': {}", layer.layer, printable(segment.name), what);
  };
  const auto name = parse_expert_tensor_name(segment.name);
  if (is_matrix ? !name || name->layer != layer.layer : !is_expert_side_tensor_name(segment.name)) {
    return refuse("not the name of an expert tensor of its layer");
  }
  const int64_t block = ggml_blck_size(segment.type);
  if (block == 0) return refuse("a type that ggml has given up");
  if (segment.ne0 <= 0 || segment.ne1 <= 0 || segment.ne0 % block != 0) return refuse("impossible shape");
  const auto row = checked_mul(static_cast<uint64_t>(segment.ne0 / block), ggml_type_size(segment.type));
  const auto bytes = row ? checked_mul(*row, static_cast<uint64_t>(segment.ne1)) : std::nullopt;
  if (!bytes || *bytes != segment.bytes) return refuse("shape and bytes do not agree");
  if (segment.offset < begin || segment.offset % kPackSegmentAlignBytes != 0)
    return refuse("overlaps or is not aligned");
  const auto end = checked_add(segment.offset, segment.bytes);
  if (!end || *end > (is_matrix ? layer.read_bytes : layer.record_stride_bytes))
    return refuse("lies outside its record");
  if (segment.native && !is_matrix) return refuse("a side tensor has no native layout");
  return {};
}

Status check_layer(const File& file, const PackLayer& layer, uint64_t records_begin) {
  const auto refuse = [&](const char* what) { return bad_pack(file, "layer {}: {}", layer.layer, what); };
  if (layer.n_matrix == 0 || layer.n_matrix > layer.segments.size()) return refuse("no matrices");
  if (layer.record_offset < records_begin) return refuse("records overlap what stands before them");
  if (layer.record_offset % kPackAlignBytes != 0 || layer.record_stride_bytes % kPackAlignBytes != 0) {
    return refuse("records are not aligned");
  }
  if (layer.read_bytes == 0 || layer.read_bytes > layer.record_stride_bytes)
    return refuse("a record is shorter than its matrices");
  const auto bytes = checked_mul(layer.record_stride_bytes, layer.n_expert);
  const auto end = bytes ? checked_add(layer.record_offset, *bytes) : std::nullopt;
  if (!end || *end > file.size_bytes()) {
    return bad_pack(file, "layer {}: its records end at byte {}, the file has {}", layer.layer,
                    end.value_or(std::numeric_limits<uint64_t>::max()), file.size_bytes());
  }
  uint64_t begin = 0;
  for (size_t i = 0; i < layer.segments.size(); ++i) {
    const PackSegment& segment = layer.segments[i];
    if (Status status = check_segment(file, layer, segment, i < layer.n_matrix, begin); !status) return status;
    begin = segment.offset + segment.bytes;
    if (i + 1 == layer.n_matrix && begin != layer.read_bytes)
      return refuse("a read does not end where the matrices do");
  }
  return {};
}

Result<PackIndex> decode_index(const File& file, Reader& in, PackIndex index, uint64_t records_begin) {
  const auto cut = [&] { return bad_pack(file, "the index contradicts its own lengths"); };
  index.native_tag = in.get_text(kPackTagBytesMax);
  index.model_header_checksum = in.get<uint64_t>();
  const uint64_t n_dense = in.get<uint64_t>();
  if (n_dense > kHeaderTensorsMax || !in.has(n_dense * sizeof(uint64_t))) return cut();
  for (uint64_t i = 0; i < n_dense; ++i) index.dense_checksums.push_back(in.get<uint64_t>());
  const uint32_t n_layer = in.get<uint32_t>();
  if (!in.ok() || n_layer == 0 || n_layer > kPackLayersMax) return cut();
  for (uint32_t i = 0; i < n_layer; ++i) {
    PackLayer layer{.layer = in.get<uint32_t>(), .n_expert = in.get<uint32_t>(), .n_matrix = in.get<uint32_t>()};
    const uint32_t n_segment = in.get<uint32_t>();
    layer.record_offset = in.get<uint64_t>();
    layer.record_stride_bytes = in.get<uint64_t>();
    layer.read_bytes = in.get<uint64_t>();
    if (!in.ok() || n_segment > kPackSegmentsMax || layer.n_expert == 0 || layer.n_expert > kPackExpertsMax)
      return cut();
    for (uint32_t s = 0; s < n_segment; ++s) {
      PackSegment segment{.name = in.get_text(kNameBytesMax)};
      const uint32_t type = in.get<uint32_t>();
      const uint32_t native = in.get<uint32_t>();
      segment.ne0 = static_cast<int64_t>(in.get<uint64_t>());
      segment.ne1 = static_cast<int64_t>(in.get<uint64_t>());
      segment.offset = in.get<uint64_t>();
      segment.bytes = in.get<uint64_t>();
      if (!in.ok() || native > 1) return cut();
      if (type >= GGML_TYPE_COUNT)
        return bad_pack(file, "layer {}: type {}, this ggml knows {}", layer.layer, type, +GGML_TYPE_COUNT);
      segment.type = static_cast<ggml_type>(type);
      segment.native = native == 1;
      layer.segments.push_back(std::move(segment));
    }
    const uint64_t n_checksum = uint64_t{layer.n_expert} * n_segment;
    if (!in.has(n_checksum * sizeof(uint64_t))) return cut();
    layer.checksums.reserve(n_checksum);
    for (uint64_t c = 0; c < n_checksum; ++c) layer.checksums.push_back(in.get<uint64_t>());
    if (!index.layers.empty() && layer.layer <= index.layers.back().layer)
      return bad_pack(file, "layers are not in order");
    if (Status status = check_layer(file, layer, records_begin); !status) return status.error();
    records_begin = layer.record_offset + layer.record_stride_bytes * layer.n_expert;
    index.layers.push_back(std::move(layer));
  }
  if (!in.ok() || !in.at_end()) return cut();
  if (records_begin != file.size_bytes()) {
    return bad_pack(file, "{} bytes where the records end at {}: not complete, or not this file", file.size_bytes(),
                    records_begin);
  }
  return index;
}

}  // namespace

const char* pack_layout_name(PackLayout layout) {
  return layout == PackLayout::kRaw ? "raw" : "native";
}

Result<PackLayout> parse_pack_layout(const std::string& text) {
  for (const PackLayout layout : {PackLayout::kRaw, PackLayout::kNative}) {
    if (text == pack_layout_name(layout)) return layout;
  }
  return make_error(ErrorCode::kBadArgument, "layout: wanted raw or native, given '{}'", text);
}

std::string PackId::text() const {
  return fmt::format("{:016x}{:016x}", high, low);
}

uint64_t pack_checksum(const std::byte* data, uint64_t bytes) {
  return XXH3_64bits(data, bytes);
}

uint64_t pack_front_bytes(const PackIndex& index) {
  return align_up(kPackHeaderBytes + encode_index(index).size(), kPackAlignBytes);
}

std::vector<std::byte> encode_pack_front(const PackIndex& index) {
  SLUICE_ASSERT(index.native_tag.size() <= kPackTagBytesMax, "a tag of {} bytes", index.native_tag.size());
  const std::vector<std::byte> body = encode_index(index);
  Writer out;
  out.put_bytes(kMagic, sizeof(kMagic));
  out.put(kPackVersion);
  out.put(static_cast<uint32_t>(index.layout));
  put_id(out, index.id);
  put_id(out, index.source);
  out.put(static_cast<uint64_t>(body.size()));
  out.put(pack_checksum(body.data(), body.size()));
  out.put(pack_checksum(out.bytes().data(), out.size()));
  out.pad_to(kPackHeaderBytes);
  out.bytes().insert(out.bytes().end(), body.begin(), body.end());
  out.pad_to(align_up(out.size(), kPackAlignBytes));
  return std::move(out.bytes());
}

Result<PackIndex> read_pack_index(const File& file) {
  std::vector<std::byte> header(kPackHeaderBytes);
  if (file.size_bytes() < kPackHeaderBytes)
    return bad_pack(file, "{} bytes: no pack's experts file is so short", file.size_bytes());
  if (Status status = file.read_exactly(0, header.data(), header.size()); !status) return status.error();
  if (std::memcmp(header.data(), kMagic, sizeof(kMagic)) != 0)
    return bad_pack(file, "not a pack's experts file: wrong magic");

  Reader in(header.data() + sizeof(kMagic), header.size() - sizeof(kMagic));
  const uint32_t version = in.get<uint32_t>();
  if (version != kPackVersion) return bad_pack(file, "pack version {}, this program reads {}", version, kPackVersion);
  const uint32_t layout = in.get<uint32_t>();
  PackIndex index;
  index.id = get_id(in);
  index.source = get_id(in);
  const uint64_t index_bytes = in.get<uint64_t>();
  const uint64_t index_checksum = in.get<uint64_t>();
  constexpr uint64_t kChecked = sizeof(kMagic) + 2 * sizeof(uint32_t) + 6 * sizeof(uint64_t);
  const bool sound = in.get<uint64_t>() == pack_checksum(header.data(), kChecked) &&
                     all_zeros(std::span(header).subspan(kChecked + sizeof(uint64_t)));
  if (!sound) return bad_pack(file, "the header is damaged");
  if (layout > static_cast<uint32_t>(PackLayout::kNative)) return bad_pack(file, "unknown layout {}", layout);
  index.layout = static_cast<PackLayout>(layout);
  const uint64_t padded_bytes =
      index_bytes <= kPackIndexBytesMax ? align_up(index_bytes, kPackAlignBytes) : index_bytes;
  if (index_bytes > kPackIndexBytesMax || padded_bytes > file.size_bytes() - kPackHeaderBytes) {
    return bad_pack(file, "an index of {} bytes in a file of {}", index_bytes, file.size_bytes());
  }

  std::vector<std::byte> body(padded_bytes);
  if (Status status = file.read_exactly(kPackHeaderBytes, body.data(), body.size()); !status) return status.error();
  if (pack_checksum(body.data(), index_bytes) != index_checksum || !all_zeros(std::span(body).subspan(index_bytes))) {
    return bad_pack(file, "the index is damaged");
  }
  Reader body_in(body.data(), index_bytes);
  return decode_index(file, body_in, std::move(index), kPackHeaderBytes + padded_bytes);
}

}  // namespace sluice
