#include "store/pack_writer.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "io/chunk_reader.h"
#include "store/gguf_header.h"
#include "store/hole_guard.h"
#include "store/merged_gguf.h"
#include "store/verify.h"

namespace sluice {

namespace {

// Read and written at once: long enough for any drive's full speed.
constexpr uint64_t kChunkBytes = 8 * kMiB;
// What one patch of a hole's guard takes of the disk: a block of the file system, or two.
constexpr uint64_t kGuardBytesMax = 8192;
constexpr PackId kNoId;

PackId id_of(const XXH128_hash_t& hash) {
  return {hash.high64, hash.low64};
}

// A file that is being written; positional writes, synced at the end.
class NewFile {
 public:
  NewFile() = default;
  NewFile(const NewFile&) = delete;
  ~NewFile() {
    if (fd_ >= 0) close(fd_);
  }

  // A file that is there keeps its bytes until resize: it may be another process's.
  Status create(const std::string& path) {
    path_ = path;
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) return make_system_error(ErrorCode::kBadArgument, errno, "cannot write '{}'", path);
    return {};
  }
  // Zeros, all of it.
  Status resize(uint64_t bytes) {
    if (ftruncate(fd_, 0) != 0) return make_system_error(ErrorCode::kBadArgument, errno, "cannot empty '{}'", path_);
    if (ftruncate(fd_, static_cast<off_t>(bytes)) == 0) return {};
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot make '{}' {} bytes long", path_, bytes);
  }
  Status write(uint64_t offset, const void* data, uint64_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t done = pwrite(fd_, from, std::min<uint64_t>(bytes, kGiB), static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0)
        return make_system_error(ErrorCode::kBadArgument, errno, "cannot write {} bytes at {} of '{}'", bytes, offset,
                                 path_);
      from += done;
      offset += static_cast<uint64_t>(done);
      bytes -= static_cast<uint64_t>(done);
    }
    return {};
  }
  Status sync() {
    if (fsync(fd_) == 0) return {};
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot sync '{}'", path_);
  }
  // What was written goes to the disk now and leaves the page cache: a pack is not read again soon. The kernel tells a
  // write that failed once only, so it must be heard here.
  Status forget(uint64_t offset, uint64_t bytes) {
    if (Status status = sync(); !status) return status;
#ifdef POSIX_FADV_DONTNEED
    (void)posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
#else
    (void)offset, (void)bytes;
#endif
    return {};
  }
  // False when another process has the lock, or had it and has given the file its final name since it was opened here.
  bool lock() {
    struct stat opened = {};
    struct stat named = {};
    return flock(fd_, LOCK_EX | LOCK_NB) == 0 && fstat(fd_, &opened) == 0 && stat(path_.c_str(), &named) == 0 &&
           opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

Status sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return make_system_error(ErrorCode::kBadArgument, errno, "cannot open the folder '{}'", path);
  const int failed = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  if (failed == 0 || failed == EINVAL) return {};  // some file systems know no such thing
  return make_system_error(ErrorCode::kBadArgument, failed, "cannot sync the folder '{}'", path);
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// The name of something in the folder that no pack has, if there is any: a user's, which is not ours to remove.
std::optional<std::string> find_foreign_file(const std::string& folder) {
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    const std::string name = entry.path().filename().string();
    if (name != kPackModelName && name != kPackExpertsName) return name;
  }
  return std::nullopt;
}

// The model, whatever it is packed as: headers and sizes of its files.
Result<PackId> source_id(const Catalog& catalog) {
  if (catalog.pack) return catalog.pack->source;
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (uint32_t file = 0; file < catalog.files.size(); ++file) {
    uint64_t data_begin = catalog.files[file]->size_bytes();
    for (const CatalogTensor& tensor : catalog.tensors) {
      if (tensor.range.file == file) data_begin = std::min(data_begin, tensor.range.offset);
    }
    std::vector<std::byte> header(data_begin);
    if (Status status = catalog.files[file]->read_exactly(0, header.data(), header.size()); !status)
      return status.error();
    const uint64_t size = catalog.files[file]->size_bytes();
    XXH3_128bits_update(&state, &size, sizeof(size));
    XXH3_128bits_update(&state, header.data(), header.size());
  }
  return id_of(XXH3_128bits_digest(&state));
}

ExpertTensorShape shape_of(const CatalogTensor& tensor) {
  return {tensor.type, tensor.ne[0], tensor.ne[1], tensor.ne[2],
          tensor.range.bytes / static_cast<uint64_t>(tensor.ne[2])};
}

// A side tensor, of which each record gets the expert's slice.
struct Side {
  const CatalogTensor* tensor = nullptr;
  std::vector<std::byte> bytes;
};

// Neighbouring experts of one matrix that lie side by side in the source, or one expert.
struct Run {
  size_t matrix = 0;
  uint32_t first_expert = 0;
  uint32_t n_expert = 0;
};

class PackWriter {
 public:
  PackWriter(const Catalog& catalog, Device& device, std::string folder, const PackOptions& options)
      : catalog_(catalog),
        device_(device),
        options_(options),
        folder_(std::move(folder)),
        partial_(folder_ + ".partial") {}
  ~PackWriter() {
    std::error_code ignored;
    if (owns_partial_) std::filesystem::remove_all(partial_, ignored);
  }
  PackWriter(const PackWriter&) = delete;

  Result<PackReport> run() {
    Status status = plan();
    if (status) status = check_target();
    if (status) status = check_space();
    if (status) status = open_partial();
    if (status) status = write_experts();
    if (status) status = write_dense();
    if (status) status = write_guards();
    if (status) status = complete();
    if (status && options_.read_back) status = read_back();
    if (status) status = publish();
    if (!status) return explain(status.error());
    return report_;
  }

 private:
  Status plan();
  Status check_target() const;
  Status check_space() const;
  Status open_partial();
  Status write_experts();
  Status write_layer(const ExpertLayer& layer, PackLayer& packed);
  Status write_group(const ExpertLayer& layer, PackLayer& packed, uint32_t first, uint32_t n, ChunkReader& reader,
                     std::span<const Run> runs);
  Status write_dense();
  Status write_guards();
  Status complete();
  Status read_back();
  Status publish();
  Error explain(const Error& error) const;

  Result<MergedGguf> merged_with(const PackId& id) const {
    return merge_gguf(catalog_,
                      [&](gguf_context* context) { gguf_set_val_str(context, kPackIdKey, id.text().c_str()); });
  }
  uint64_t bytes_needed() const {
    return report_.experts_file_bytes + merged_.header.size() + report_.dense_bytes + n_guard_ * kGuardBytesMax;
  }
  Status advance(uint64_t bytes) {
    done_bytes_ += bytes;
    if (!options_.on_progress || options_.on_progress("packing", done_bytes_, total_bytes_)) return {};
    return make_error(ErrorCode::kCancelled, "packing stopped on request");
  }

  const Catalog& catalog_;
  Device& device_;
  const PackOptions& options_;
  const std::string folder_;
  const std::string partial_;
  bool owns_partial_ = false;

  PackIndex index_;
  MergedGguf merged_;  // with an id of zeros
  PackReport report_;
  uint64_t n_guard_ = 0;  // patches in model.gguf's holes
  uint64_t done_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  NewFile experts_;
  NewFile model_;
  std::vector<Side> sides_;  // of the layer that is being written
  std::vector<std::byte> group_;
};

Status PackWriter::plan() {
  if (!catalog_.is_moe())
    return make_error(ErrorCode::kBadArgument, "{}: a dense model has no experts to pack",
                      catalog_.files.front()->path());
  auto source = source_id(catalog_);
  if (!source) return source.error();
  index_.source = *source;
  if (options_.transform != nullptr) {
    index_.layout = PackLayout::kNative;
    index_.native_tag = options_.transform->tag();
  }
  auto merged = merged_with(kNoId);
  if (!merged) return merged.error();
  merged_ = std::move(*merged);
  index_.model_header_checksum =
      pack_checksum(reinterpret_cast<const std::byte*>(merged_.header.data()), merged_.header.size());

  for (const ExpertLayer& layer : catalog_.expert_layers) {
    PackLayer packed{
        .layer = layer.layer, .n_expert = layer.n_expert, .n_matrix = static_cast<uint32_t>(layer.matrices.size())};
    uint64_t end = 0;
    const auto add_segment = [&](PackSegment segment) {
      segment.offset = align_up(end, kPackSegmentAlignBytes);
      end = segment.offset + segment.bytes;
      packed.segments.push_back(std::move(segment));
    };
    for (const ExpertMatrix& matrix : layer.matrices) {
      if (matrix.native)
        return make_error(ErrorCode::kBadArgument,
                          "{}: a native pack cannot be packed again: start from the GGUF or a raw pack",
                          catalog_.files.back()->path());
      const ExpertTensorShape& shape = matrix.shape;
      const bool native = options_.transform != nullptr && options_.transform->applies(shape);
      report_.n_native += native;
      add_segment({.name = expert_tensor_name({layer.layer, matrix.role}),
                   .type = shape.type,
                   .native = native,
                   .ne0 = shape.n_in,
                   .ne1 = shape.n_out,
                   .bytes = shape.slab_bytes});
    }
    packed.read_bytes = end;
    for (const std::string& name : layer.side_tensors) {
      for (const CatalogTensor& tensor : catalog_.tensors) {
        const int64_t n_expert = layer.n_expert;
        const bool vectors = tensor.ne[1] == n_expert && tensor.ne[2] == 1;
        const bool numbers = tensor.ne[0] == n_expert && tensor.ne[1] == 1 && ggml_blck_size(tensor.type) == 1;
        if (tensor.name != name || (!vectors && !numbers)) continue;  // one for all experts is no expert's
        add_segment({.name = name,
                     .type = tensor.type,
                     .ne0 = vectors ? tensor.ne[0] : 1,
                     .ne1 = 1,
                     .bytes = tensor.range.bytes / layer.n_expert});
      }
    }
    SLUICE_ASSERT(packed.segments.size() <= kPackSegmentsMax, "layer {}: {} segments", layer.layer,
                  packed.segments.size());
    packed.record_stride_bytes = align_up(end, kPackAlignBytes);
    packed.checksums.resize(packed.n_expert * packed.segments.size());
    index_.layers.push_back(std::move(packed));
    report_.n_record += layer.n_expert;
    for (const ExpertMatrix& matrix : layer.matrices)
      n_guard_ += hole_guard(matrix.role, matrix.shape).size() * layer.n_expert;
  }
  for (const CatalogTensor& tensor : catalog_.tensors) {
    if (!parse_expert_tensor_name(tensor.name)) index_.dense_checksums.push_back(0);
  }
  uint64_t offset = pack_front_bytes(index_);
  for (PackLayer& layer : index_.layers) {
    layer.record_offset = offset;
    offset += layer.record_stride_bytes * layer.n_expert;
  }
  report_.experts_file_bytes = offset;
  report_.dense_bytes = catalog_.dense_bytes;
  total_bytes_ = catalog_.expert_bytes + catalog_.dense_bytes;
  return {};
}

// Nothing there, an empty folder, or a pack of this very model.
Status PackWriter::check_target() const {
  std::error_code failed;
  const auto status = std::filesystem::symlink_status(folder_, failed);
  if (status.type() == std::filesystem::file_type::not_found) return {};
  const auto refuse = [&](const std::string& what) {
    return make_error(ErrorCode::kBadArgument, "'{}' {}; choose another name or remove it", folder_, what);
  };
  if (status.type() != std::filesystem::file_type::directory) return refuse("is there and is no folder");
  if (std::filesystem::is_empty(folder_, failed) && !failed) return {};
  const auto file = File::open(folder_ + "/" + kPackExpertsName, DirectMode::kOff);
  if (!file) return refuse("is there and holds something else than a pack");
  if (const auto foreign = find_foreign_file(folder_))
    return refuse(fmt::format("holds '{}', which is no part of a pack", *foreign));
  const auto held = read_pack_index(**file);
  if (!held) return refuse(fmt::format("holds what this program cannot read as a pack ({})", held.error().message()));
  if (!(held->source == index_.source)) {
    return refuse(
        fmt::format("holds a pack of another model (source {}, given {})", held->source.text(), index_.source.text()));
  }
  return {};
}

Status PackWriter::check_space() const {
  struct statvfs info = {};
  if (statvfs(parent_of(folder_).c_str(), &info) != 0) {
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot write into '{}'", parent_of(folder_));
  }
  const uint64_t free_bytes = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  if (free_bytes >= bytes_needed()) return {};
  return make_error(ErrorCode::kBadArgument, "the pack needs {} ({} bytes), free at '{}': {} ({} bytes)",
                    format_bytes(bytes_needed()), bytes_needed(), parent_of(folder_), format_bytes(free_bytes),
                    free_bytes);
}

// The error that stopped the work; a disk that ran full meanwhile is told with its numbers.
Error PackWriter::explain(const Error& error) const {
  if (error.system_error != ENOSPC && error.system_error != EDQUOT) return error;
  struct statvfs info = {};
  const bool known = statvfs(parent_of(folder_).c_str(), &info) == 0;
  const uint64_t free_bytes = known ? static_cast<uint64_t>(info.f_bavail) * info.f_frsize : 0;
  return make_error(
      ErrorCode::kBadArgument, "the disk is full: the pack needs {} ({} bytes), {} were written, free now: {} ({})",
      format_bytes(bytes_needed()), bytes_needed(), format_bytes(done_bytes_), format_bytes(free_bytes), error.text);
}

Status PackWriter::open_partial() {
  std::error_code failed;
  const bool made = std::filesystem::create_directory(partial_, failed);
  if (failed)
    return make_system_error(ErrorCode::kBadArgument, failed.value(), "cannot make the folder '{}'", partial_);
  if (const auto foreign = find_foreign_file(partial_); foreign && !made) {
    return make_error(ErrorCode::kBadArgument, "'{}' is there and holds '{}', which is no part of a pack; remove it",
                      partial_, *foreign);
  }
  // A folder that was there is somebody's who writes it and holds the lock, or was left by one that was killed.
  if (Status status = experts_.create(partial_ + "/" + kPackExpertsName); !status) {
    if (made) std::filesystem::remove(partial_, failed);
    return status;
  }
  if (!experts_.lock())
    return make_error(ErrorCode::kBadArgument, "'{}' is being written by another process", partial_);
  owns_partial_ = true;
  Status status = model_.create(partial_ + "/" + kPackModelName);
  if (status) status = experts_.resize(report_.experts_file_bytes);
  if (status) status = model_.resize(merged_.size_bytes);
  return status;
}

Status PackWriter::write_experts() {
  for (size_t i = 0; i < index_.layers.size(); ++i) {
    if (Status status = write_layer(catalog_.expert_layers[i], index_.layers[i]); !status) return status;
  }
  return {};
}

Status PackWriter::write_layer(const ExpertLayer& layer, PackLayer& packed) {
  sides_.clear();
  for (size_t i = packed.n_matrix; i < packed.segments.size(); ++i) {
    const auto tensor =
        std::find_if(catalog_.tensors.begin(), catalog_.tensors.end(),
                     [&](const CatalogTensor& candidate) { return candidate.name == packed.segments[i].name; });
    Side side{.tensor = &*tensor, .bytes = std::vector<std::byte>(tensor->range.bytes)};
    const FileRange& range = tensor->range;
    if (Status status = catalog_.files[range.file]->read_exactly(range.offset, side.bytes.data(), range.bytes); !status)
      return status;
    sides_.push_back(std::move(side));
  }

  // Groups of neighbouring records; of each matrix the whole group in one read, where it lies side by side.
  const auto n_group =
      static_cast<uint32_t>(std::clamp<uint64_t>(kChunkBytes / packed.record_stride_bytes, 1, packed.n_expert));
  std::vector<Run> runs;
  std::vector<size_t> first_run;  // of each group
  std::vector<ChunkRequest> requests;
  for (uint32_t first = 0; first < packed.n_expert; first += n_group) {
    const uint32_t end = std::min(first + n_group, packed.n_expert);
    first_run.push_back(runs.size());
    for (size_t matrix = 0; matrix < layer.matrices.size(); ++matrix) {
      const ExpertSpan& span = layer.spans[layer.matrices[matrix].span];
      const bool side_by_side = span.stride_bytes == layer.matrices[matrix].shape.slab_bytes;
      for (uint32_t expert = first; expert < end; expert += runs.back().n_expert) {
        runs.push_back({matrix, expert, side_by_side ? end - expert : 1});
        const FileRange slab = layer.slab_range(layer.matrices[matrix], expert);
        requests.push_back({catalog_.files[slab.file].get(), slab.offset, slab.bytes * runs.back().n_expert});
      }
    }
  }
  first_run.push_back(runs.size());
  auto reader = ChunkReader::create(device_, std::move(requests));
  if (!reader) return reader.error();
  for (size_t group = 0; group + 1 < first_run.size(); ++group) {
    const uint32_t first = static_cast<uint32_t>(group) * n_group;
    const std::span<const Run> group_runs(runs.data() + first_run[group], first_run[group + 1] - first_run[group]);
    const uint32_t n = std::min(n_group, packed.n_expert - first);
    if (Status status = write_group(layer, packed, first, n, **reader, group_runs); !status) return status;
  }
  return experts_.forget(packed.record_offset, packed.record_stride_bytes * packed.n_expert);
}

Status PackWriter::write_group(const ExpertLayer& layer, PackLayer& packed, uint32_t first, uint32_t n,
                               ChunkReader& reader, std::span<const Run> runs) {
  group_.assign(packed.record_stride_bytes * n, std::byte{0});
  const auto segment_data = [&](uint32_t expert, size_t segment) {
    return group_.data() + (expert - first) * packed.record_stride_bytes + packed.segments[segment].offset;
  };
  for (const Run& run : runs) {
    const auto chunk = reader.next();
    if (!chunk) return chunk.error();
    const ExpertTensorShape& shape = layer.matrices[run.matrix].shape;
    for (uint32_t i = 0; i < run.n_expert; ++i) {
      const std::byte* from = chunk->data() + i * shape.slab_bytes;
      std::byte* to = segment_data(run.first_expert + i, run.matrix);
      if (packed.segments[run.matrix].native) {
        if (Status status = options_.transform->apply(shape, from, to); !status) return status;
      } else {
        std::copy_n(from, shape.slab_bytes, to);
      }
    }
    if (Status status = advance(chunk->size()); !status) return status;
  }
  for (uint32_t expert = first; expert < first + n; ++expert) {
    for (size_t i = 0; i < sides_.size(); ++i) {
      const uint64_t bytes = packed.segments[packed.n_matrix + i].bytes;
      std::copy_n(sides_[i].bytes.data() + expert * bytes, bytes, segment_data(expert, packed.n_matrix + i));
    }
    for (size_t i = 0; i < packed.segments.size(); ++i) {
      packed.checksums[expert * packed.segments.size() + i] =
          pack_checksum(segment_data(expert, i), packed.segments[i].bytes);
    }
  }
  return experts_.write(packed.record_offset + first * packed.record_stride_bytes, group_.data(), group_.size());
}

Status PackWriter::write_dense() {
  std::vector<ChunkRequest> requests;
  for (const CatalogTensor& tensor : catalog_.tensors) {
    if (parse_expert_tensor_name(tensor.name)) continue;
    for (uint64_t at = 0; at < tensor.range.bytes; at += kChunkBytes) {
      requests.push_back({catalog_.files[tensor.range.file].get(), tensor.range.offset + at,
                          std::min(kChunkBytes, tensor.range.bytes - at)});
    }
  }
  auto reader = ChunkReader::create(device_, std::move(requests));
  if (!reader) return reader.error();
  size_t dense = 0;
  for (size_t i = 0; i < catalog_.tensors.size(); ++i) {
    const CatalogTensor& tensor = catalog_.tensors[i];
    if (parse_expert_tensor_name(tensor.name)) continue;
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (uint64_t at = 0; at < tensor.range.bytes; at += kChunkBytes) {
      const auto chunk = (*reader)->next();
      if (!chunk) return chunk.error();
      XXH3_64bits_update(&state, chunk->data(), chunk->size());
      Status status = model_.write(merged_.offsets[i] + at, chunk->data(), chunk->size());
      if (status) status = advance(chunk->size());
      if (!status) return status;
    }
    index_.dense_checksums[dense++] = XXH3_64bits_digest(&state);
  }
  return {};
}

// model.gguf has holes where the experts would be.
Status PackWriter::write_guards() {
  for (size_t i = 0; i < catalog_.tensors.size(); ++i) {
    const CatalogTensor& tensor = catalog_.tensors[i];
    const auto name = parse_expert_tensor_name(tensor.name);
    if (!name) continue;
    const ExpertTensorShape shape = shape_of(tensor);
    for (const GuardPatch& patch : hole_guard(name->role, shape)) {
      for (uint64_t expert = 0; expert < static_cast<uint64_t>(shape.n_expert); ++expert) {
        const uint64_t offset = merged_.offsets[i] + expert * shape.slab_bytes + patch.offset;
        if (Status status = model_.write(offset, patch.bytes.data(), patch.bytes.size()); !status) return status;
      }
    }
  }
  return {};
}

// The contents are known now, so they can be named: both files get the identity, and are on the disk afterwards.
Status PackWriter::complete() {
  for (const auto& file : catalog_.files) {
    if (Status status = file->check_unchanged(); !status) return status;
  }
  index_.id = kNoId;
  const std::vector<std::byte> unnamed = encode_pack_front(index_);
  index_.id = id_of(XXH3_128bits(unnamed.data(), unnamed.size()));
  report_.id = index_.id;
  const std::vector<std::byte> front = encode_pack_front(index_);
  auto merged = merged_with(index_.id);
  if (!merged) return merged.error();
  SLUICE_ASSERT(merged->header.size() == merged_.header.size(), "an id of another length");
  Status status = experts_.write(0, front.data(), front.size());
  if (status) status = model_.write(0, merged->header.data(), merged->header.size());
  if (status) status = experts_.sync();
  if (status) status = model_.sync();
  if (status) status = sync_folder(partial_);
  return status;
}

Status PackWriter::read_back() {
  const auto catalog = Catalog::open(partial_, DirectMode::kAuto);
  if (!catalog) return catalog.error();
  const auto report = verify_model(*catalog, device_, [&](const char*, uint64_t done, uint64_t total) {
    return !options_.on_progress || options_.on_progress("reading back", done, total);
  });
  if (!report) return report.error();
  if (report->damages.empty()) return {};
  return make_error(ErrorCode::kBadFile, "what was written reads back differently: {}",
                    report->damages.front().message());
}

Status PackWriter::publish() {
  if (Status status = check_target(); !status) return status;  // much time has gone by
  const auto failed = [&] {
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot rename '{}' to '{}'", partial_, folder_);
  };
  std::error_code ignored;
  const bool replaces = std::filesystem::exists(folder_, ignored) && !std::filesystem::is_empty(folder_, ignored);
  if (!replaces) {
    if (std::rename(partial_.c_str(), folder_.c_str()) != 0) return failed();
    owns_partial_ = false;
  } else {
#ifdef RENAME_EXCHANGE
    // The name leads to the old pack or to the new one, at every moment; what is left under the other name is removed.
    const bool exchanged = renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, folder_.c_str(), RENAME_EXCHANGE) == 0;
#else
    const bool exchanged = false;
#endif
    if (!exchanged) {
      std::filesystem::remove_all(folder_, ignored);
      if (std::rename(partial_.c_str(), folder_.c_str()) != 0) return failed();
      owns_partial_ = false;
    }
  }
  return sync_folder(parent_of(folder_));
}

}  // namespace

Result<PackReport> write_pack(const Catalog& catalog, Device& device, const std::string& folder,
                              const PackOptions& options) {
  std::string name = folder;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  return PackWriter(catalog, device, name, options).run();
}

std::string default_pack_folder(const std::string& model_path) {
  std::string name = model_path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  constexpr std::string_view kExtension = ".gguf";
  if (name.ends_with(kExtension)) name.resize(name.size() - kExtension.size());
  constexpr std::string_view kPart = "-NNNNN-of-NNNNN";
  if (name.size() > kPart.size()) {
    const std::string_view tail = std::string_view(name).substr(name.size() - kPart.size());
    const bool is_part = std::equal(tail.begin(), tail.end(), kPart.begin(), [](char found, char wanted) {
      return wanted == 'N' ? found >= '0' && found <= '9' : found == wanted;
    });
    if (is_part) name.resize(name.size() - kPart.size());
  }
  return name + ".pack";
}

}  // namespace sluice
