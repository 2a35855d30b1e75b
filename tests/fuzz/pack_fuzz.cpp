// Any bytes as a pack's experts file beside a small sound model.gguf: a catalog whose every range lies inside its file,
// or a refusal in one line. What opens can be verified too.
//
// Input    u8 mode, u64 bytes of the file, then content. Mode 0 (even): the content is the file's beginning. Mode 1
// (odd):
//          the content is an index, and a header with right checksums is put before it, for no mutation would find one.
// Seeds    pack_fuzz --write-corpus=FOLDER makes them again.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/assert.h"
#include "base/bytes.h"
#include "io/memory_device.h"
#include "store/catalog.h"
#include "store/gguf_header.h"
#include "store/pack_format.h"
#include "store/verify.h"

namespace {

using Bytes = std::vector<std::byte>;

constexpr sluice::PackId kId{0x0123456789abcdef, 0xfedcba9876543210};
constexpr uint32_t kExperts = 3;
constexpr int64_t kHidden = 32;
constexpr int64_t kFf = 64;
constexpr size_t kPrefixBytes = 9;           // of the input: mode and file size
constexpr uint64_t kFileBytesMax = 1 << 24;  // sparse
constexpr uint64_t kVerifyBytesMax = 1 << 20;

std::string folder;

template <typename T>
void put(Bytes& bytes, T value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof(value));
}

// One layer with experts and their biases, and one dense tensor.
void write_model(const std::string& path) {
  const sluice::GgufContextPtr context(gguf_init_empty());
  gguf_set_val_str(context.get(), "general.architecture", "qwen3moe");
  gguf_set_val_str(context.get(), sluice::kPackIdKey, kId.text().c_str());
  for (const auto& [key, value] : {std::pair("qwen3moe.block_count", 1u),
                                   {"qwen3moe.expert_count", kExperts},
                                   {"qwen3moe.expert_used_count", 1u}}) {
    gguf_set_val_u32(context.get(), key, value);
  }
  std::vector<std::vector<uint8_t>> contents;
  const auto add = [&](const char* name, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor tensor{};
    tensor.type = type;
    tensor.ne[0] = ne0, tensor.ne[1] = ne1, tensor.ne[2] = ne2, tensor.ne[3] = 1;
    tensor.nb[0] = ggml_type_size(type);
    tensor.nb[1] = ggml_row_size(type, ne0);
    tensor.nb[2] = tensor.nb[1] * static_cast<size_t>(ne1);
    tensor.nb[3] = tensor.nb[2] * static_cast<size_t>(ne2);
    ggml_set_name(&tensor, name);
    contents.emplace_back(tensor.nb[3]);
    gguf_add_tensor(context.get(), &tensor);
    gguf_set_tensor_data(context.get(), name, contents.back().data());
  };
  add("output_norm.weight", GGML_TYPE_F32, kHidden, 1, 1);
  add("blk.0.ffn_gate_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf, kExperts);
  add("blk.0.ffn_up_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf, kExperts);
  add("blk.0.ffn_down_exps.weight", GGML_TYPE_Q8_0, kFf, kHidden, kExperts);
  add("blk.0.ffn_up_exps.bias", GGML_TYPE_F32, kFf, kExperts, 1);
  SLUICE_ASSERT(gguf_write_to_file(context.get(), path.c_str(), /*only_meta=*/false), "cannot write {}", path);
}

// An index that belongs to that model.
sluice::PackIndex sound_index() {
  sluice::PackIndex index{.id = kId, .dense_checksums = {1, 2}};
  sluice::PackLayer layer{.layer = 0, .n_expert = kExperts, .n_matrix = 3};
  uint64_t end = 0;
  const auto add = [&](const char* name, ggml_type type, int64_t ne0, int64_t ne1) {
    const uint64_t bytes = ggml_row_size(type, ne0) * static_cast<uint64_t>(ne1);
    const uint64_t offset = sluice::align_up(end, sluice::kPackSegmentAlignBytes);
    layer.segments.push_back({.name = name, .type = type, .ne0 = ne0, .ne1 = ne1, .offset = offset, .bytes = bytes});
    end = offset + bytes;
  };
  add("blk.0.ffn_gate_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf);
  add("blk.0.ffn_up_exps.weight", GGML_TYPE_Q4_0, kHidden, kFf);
  add("blk.0.ffn_down_exps.weight", GGML_TYPE_Q8_0, kFf, kHidden);
  layer.read_bytes = end;
  add("blk.0.ffn_up_exps.bias", GGML_TYPE_F32, kFf, 1);
  layer.record_stride_bytes = sluice::align_up(end, sluice::kPackAlignBytes);
  layer.checksums.resize(kExperts * layer.segments.size());
  index.layers.push_back(layer);
  index.layers[0].record_offset = sluice::pack_front_bytes(index);
  return index;
}

uint64_t file_bytes_of(const sluice::PackIndex& index) {
  const sluice::PackLayer& layer = index.layers.back();
  return layer.record_offset + layer.record_stride_bytes * layer.n_expert;
}

void write_seed(const std::string& path, uint8_t mode, uint64_t file_bytes, const Bytes& content) {
  Bytes seed;
  put(seed, mode);
  put(seed, file_bytes);
  seed.insert(seed.end(), content.begin(), content.end());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
}

Bytes index_part(const sluice::PackIndex& index) {
  Bytes front = sluice::encode_pack_front(index);
  uint64_t bytes = 0;
  std::memcpy(&bytes, front.data() + 48, sizeof(bytes));
  return {front.begin() + sluice::kPackHeaderBytes,
          front.begin() + static_cast<ptrdiff_t>(sluice::kPackHeaderBytes + bytes)};
}

void write_corpus(const std::string& target) {
  const sluice::PackIndex sound = sound_index();
  write_seed(target + "/file", 0, file_bytes_of(sound), sluice::encode_pack_front(sound));
  write_seed(target + "/index", 1, file_bytes_of(sound), index_part(sound));
  sluice::PackIndex native = sound;
  native.layout = sluice::PackLayout::kNative;
  native.native_tag = "ggml";
  native.layers[0].segments[2].native = true;
  write_seed(target + "/index-native", 1, file_bytes_of(native), index_part(native));
  sluice::PackIndex foreign = sound;
  foreign.layers[0].segments[3].name = "blk.0.ffn_down_exps.bias";
  write_seed(target + "/index-foreign-side", 1, file_bytes_of(foreign), index_part(foreign));
  sluice::PackIndex dense = sound;
  dense.dense_checksums.pop_back();
  write_seed(target + "/index-few-dense", 1, file_bytes_of(dense), index_part(dense));
}

// The header that belongs to an index, whatever it says.
Bytes header_of(const std::byte* index, size_t bytes) {
  Bytes header;
  for (const char c : std::string_view("SLUICEPK")) put(header, c);
  put(header, sluice::kPackVersion);
  put(header, static_cast<uint32_t>(sluice::PackLayout::kRaw));
  for (const uint64_t half : {kId.high, kId.low, uint64_t{0}, uint64_t{0}}) put(header, half);
  put(header, static_cast<uint64_t>(bytes));
  put(header, sluice::pack_checksum(index, bytes));
  put(header, sluice::pack_checksum(header.data(), header.size()));
  header.resize(sluice::kPackHeaderBytes);
  return header;
}

void check_ranges(const sluice::Catalog& catalog) {
  for (const sluice::ExpertLayer& layer : catalog.expert_layers) {
    for (uint32_t expert = 0; expert < layer.n_expert; ++expert) {
      for (const sluice::ExpertSpan& span : layer.spans) {
        const uint64_t end = span.offset + expert * span.stride_bytes + span.bytes;
        SLUICE_ASSERT(end <= catalog.files[span.file]->size_bytes(), "a span ends at {}", end);
      }
      for (const sluice::ExpertMatrix& matrix : layer.matrices) {
        const sluice::FileRange slab = layer.slab_range(matrix, expert);
        SLUICE_ASSERT(matrix.offset + slab.bytes <= layer.spans[matrix.span].bytes, "a slab ends behind its span");
        SLUICE_ASSERT(slab.offset + slab.bytes <= catalog.files[slab.file]->size_bytes(),
                      "a slab ends behind the file");
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  std::string pattern = "/dev/shm/sluice-pack-fuzz-XXXXXX";
  SLUICE_ASSERT(mkdtemp(pattern.data()) != nullptr, "no folder for the model");
  folder = pattern;
  std::atexit([] {
    for (const char* name : {sluice::kPackModelName, sluice::kPackExpertsName}) unlink((folder + "/" + name).c_str());
    rmdir(folder.c_str());
  });
  write_model(folder + "/" + sluice::kPackModelName);
  constexpr std::string_view kWrite = "--write-corpus=";
  for (int i = 1; i < *argc; ++i) {
    if (!std::string_view((*argv)[i]).starts_with(kWrite)) continue;
    write_corpus((*argv)[i] + kWrite.size());
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kPrefixBytes) return -1;
  uint64_t file_bytes = 0;
  std::memcpy(&file_bytes, data + 1, sizeof(file_bytes));
  const auto* content = reinterpret_cast<const std::byte*>(data + kPrefixBytes);
  const size_t content_bytes = size - kPrefixBytes;
  Bytes bytes;
  if (data[0] % 2 == 1) bytes = header_of(content, content_bytes);
  bytes.insert(bytes.end(), content, content + content_bytes);

  const std::string path = folder + "/" + sluice::kPackExpertsName;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  SLUICE_ASSERT(fd >= 0, "cannot write {}", path);
  SLUICE_ASSERT(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "{} takes no {} bytes",
                path, bytes.size());
  const uint64_t whole = std::max<uint64_t>(bytes.size(), std::min(file_bytes, kFileBytesMax));
  SLUICE_ASSERT(ftruncate(fd, static_cast<off_t>(whole)) == 0, "{} does not grow to {} bytes", path, whole);
  close(fd);

  const auto catalog = sluice::Catalog::open(folder, sluice::DirectMode::kOff);
  if (!catalog) {
    const std::string text = catalog.error().message();
    SLUICE_ASSERT(!text.empty() && text.find('\n') == std::string::npos, "not one line: {}", text);
    return 0;
  }
  check_ranges(*catalog);
  if (whole > kVerifyBytesMax) return 0;
  sluice::MemoryDevice device;
  const auto report = sluice::verify_model(*catalog, device, {});
  SLUICE_ASSERT(report.ok(), "{}", report.error().message());
  for (const sluice::Damage& damage : report->damages) {
    SLUICE_ASSERT(damage.message().find('\n') == std::string::npos, "not one line: {}", damage.message());
  }
  return 0;
}
