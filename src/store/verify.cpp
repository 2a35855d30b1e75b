#include "store/verify.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "io/chunk_reader.h"

namespace sluice {

namespace {

constexpr uint64_t kChunkBytes = 8 * kMiB;

// One stretch of a file that is judged as a whole.
struct Piece {
  const File* file = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  const CatalogTensor* tensor = nullptr;
  int64_t expert = -1;
  const uint64_t* checksum = nullptr;
};

// Whole blocks of the tensor's type.
uint64_t chunk_bytes(const Piece& piece) {
  const uint64_t block = ggml_type_size(piece.tensor->type);
  return kChunkBytes / block * block;
}

// [begin, end) of zeros inside a slab.
using ZeroRun = std::pair<uint64_t, uint64_t>;

bool has_zeros(const std::vector<ZeroRun>& runs, const ZeroRun& wanted) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const ZeroRun& run) { return run.first <= wanted.first && wanted.second <= run.second; });
}

class Verifier {
 public:
  Verifier(const Catalog& catalog, Device& device, const WorkProgress& on_progress)
      : catalog_(catalog), device_(device), on_progress_(on_progress) {}

  Result<VerifyReport> run() {
    report_.checksums = catalog_.pack != nullptr;
    list_pieces();
    std::vector<ChunkRequest> requests;
    for (const Piece& piece : pieces_) {
      total_bytes_ += piece.bytes;
      for (uint64_t at = 0; at < piece.bytes; at += chunk_bytes(piece)) {
        requests.push_back({piece.file, piece.offset + at, std::min(chunk_bytes(piece), piece.bytes - at)});
      }
    }
    auto reader = ChunkReader::create(device_, std::move(requests));
    if (!reader) return reader.error();
    if (catalog_.pack) {
      if (Status status = check_model_header(); !status) return status.error();
    }
    for (const Piece& piece : pieces_) {
      if (Status status = check(piece, **reader); !status) return status.error();
    }
    report_zero_runs();
    for (const auto& file : catalog_.files) {
      if (Status status = file->check_unchanged(); !status) return status.error();
    }
    return std::move(report_);
  }

 private:
  void list_pieces();
  Status check_model_header();
  Status check(const Piece& piece, ChunkReader& reader);
  void find_zero_runs(const Piece& piece, std::span<const std::byte> bytes, uint64_t at);
  void report_zero_runs();
  void add_damage(const Piece& piece, uint64_t offset, uint64_t bytes, std::string what) {
    report_.damages.push_back({.tensor = piece.tensor->name,
                               .expert = piece.expert,
                               .file = piece.file->path(),
                               .offset = offset,
                               .bytes = bytes,
                               .what = std::move(what)});
  }

  const Catalog& catalog_;
  Device& device_;
  const WorkProgress& on_progress_;
  VerifyReport report_;
  uint64_t total_bytes_ = 0;
  std::vector<Piece> pieces_;
  // Of each expert tensor and expert: long stretches of zeros.
  std::map<const CatalogTensor*, std::map<int64_t, std::pair<Piece, std::vector<ZeroRun>>>> zero_runs_;
};

void Verifier::list_pieces() {
  std::map<std::string_view, const CatalogTensor*> tensor_of;
  size_t dense = 0;
  for (const CatalogTensor& tensor : catalog_.tensors) {
    ++report_.n_tensor;
    tensor_of[tensor.name] = &tensor;
    if (parse_expert_tensor_name(tensor.name)) continue;
    pieces_.push_back({.file = catalog_.files[tensor.range.file].get(),
                       .offset = tensor.range.offset,
                       .bytes = tensor.range.bytes,
                       .tensor = &tensor,
                       .checksum = catalog_.pack ? &catalog_.pack->dense_checksums[dense] : nullptr});
    ++dense;
  }
  if (catalog_.pack) {  // whole records, with what no run reads
    for (const PackLayer& layer : catalog_.pack->layers) {
      for (uint32_t expert = 0; expert < layer.n_expert; ++expert) {
        for (size_t i = 0; i < layer.segments.size(); ++i) {
          const PackSegment& segment = layer.segments[i];
          pieces_.push_back({.file = catalog_.files.back().get(),
                             .offset = layer.record_offset + expert * layer.record_stride_bytes + segment.offset,
                             .bytes = segment.bytes,
                             .tensor = tensor_of.at(segment.name),
                             .expert = expert,
                             .checksum = &layer.checksums[expert * layer.segments.size() + i]});
          report_.n_slab += i < layer.n_matrix;
        }
      }
    }
    return;
  }
  for (const ExpertLayer& layer : catalog_.expert_layers) {
    for (const ExpertMatrix& matrix : layer.matrices) {
      for (uint32_t expert = 0; expert < layer.n_expert; ++expert) {
        const FileRange slab = layer.slab_range(matrix, expert);
        pieces_.push_back({.file = catalog_.files[slab.file].get(),
                           .offset = slab.offset,
                           .bytes = slab.bytes,
                           .tensor = tensor_of.at(expert_tensor_name({layer.layer, matrix.role})),
                           .expert = expert});
        ++report_.n_slab;
      }
    }
  }
}

// The pack's sum of model.gguf's metadata was taken with an id of zeros: the id is a sum of the index, which holds it.
Status Verifier::check_model_header() {
  const File& file = *catalog_.files.front();
  uint64_t bytes = file.size_bytes();
  for (const CatalogTensor& tensor : catalog_.tensors) bytes = std::min(bytes, tensor.range.offset);
  std::string header(bytes, '\0');
  if (Status status = file.read_exactly(0, header.data(), bytes); !status) return status;
  const std::string id = catalog_.pack->id.text();
  if (const size_t at = header.find(id); at != std::string::npos) header.replace(at, id.size(), PackId{}.text());
  if (pack_checksum(reinterpret_cast<const std::byte*>(header.data()), bytes) == catalog_.pack->model_header_checksum)
    return {};
  report_.damages.push_back(
      {.tensor = "metadata", .file = file.path(), .offset = 0, .bytes = bytes, .what = "differs from its checksum"});
  return {};
}

Status Verifier::check(const Piece& piece, ChunkReader& reader) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  bool valid = true;
  for (uint64_t at = 0; at < piece.bytes; at += chunk_bytes(piece)) {
    const auto chunk = reader.next();
    if (!chunk) return chunk.error();
    report_.bytes += chunk->size();
    if (on_progress_ && !on_progress_("verifying", report_.bytes, total_bytes_)) {
      return make_error(ErrorCode::kCancelled, "verifying stopped on request");
    }
    if (piece.checksum != nullptr) {
      XXH3_64bits_update(&state, chunk->data(), chunk->size());
      continue;
    }
    if (valid && !ggml_validate_row_data(piece.tensor->type, chunk->data(), chunk->size())) {
      valid = false;
      add_damage(piece, piece.offset, piece.bytes, "holds values that are no numbers");
    }
    if (piece.expert >= 0) find_zero_runs(piece, *chunk, at);
  }
  if (piece.checksum != nullptr && XXH3_64bits_digest(&state) != *piece.checksum) {
    add_damage(piece, piece.offset, piece.bytes, "differs from its checksum");
  }
  return {};
}

// Counted in steps of 64 bytes: a run's ends need not be exact.
void Verifier::find_zero_runs(const Piece& piece, std::span<const std::byte> bytes, uint64_t at) {
  constexpr uint64_t kStep = 64;
  static constexpr std::byte kZeros[kStep] = {};
  auto& runs = zero_runs_[piece.tensor][piece.expert];
  runs.first = piece;
  for (uint64_t i = 0; i < bytes.size(); i += kStep) {
    const uint64_t n = std::min<uint64_t>(kStep, bytes.size() - i);
    if (!std::equal(bytes.begin() + static_cast<ptrdiff_t>(i), bytes.begin() + static_cast<ptrdiff_t>(i + n), kZeros))
      continue;
    if (!runs.second.empty() && runs.second.back().second == at + i) {
      runs.second.back().second = at + i + n;
    } else {
      runs.second.emplace_back(at + i, at + i + n);
    }
  }
  // A short run that another chunk cannot continue is forgotten.
  std::erase_if(runs.second, [&](const ZeroRun& run) {
    const bool whole = run.second - run.first == piece.bytes;
    return run.second - run.first < kZeroRunBytesMin && run.second != at + bytes.size() && !whole;
  });
}

void Verifier::report_zero_runs() {
  for (auto& [tensor, experts] : zero_runs_) {
    for (auto& [expert, entry] : experts) {
      std::erase_if(entry.second, [piece = &entry.first](const ZeroRun& run) {
        return run.second - run.first < std::min(kZeroRunBytesMin, piece->bytes);
      });
    }
    bool padded = false;
    for (const auto& [expert, entry] : experts) {
      const auto& [piece, runs] = entry;
      for (const ZeroRun& run : runs) {
        const bool whole = run.second - run.first == piece.bytes;
        if (!whole && experts.size() > 1 && std::all_of(experts.begin(), experts.end(), [&](const auto& other) {
              return has_zeros(other.second.second, run);
            })) {
          padded = true;
          continue;
        }
        add_damage(piece, piece.offset + run.first, run.second - run.first,
                   whole ? "is all zeros" : "has a stretch of zeros");
      }
    }
    if (padded) report_.padded.push_back(tensor->name);
  }
}

}  // namespace

std::string Damage::message() const {
  const std::string of_expert = expert >= 0 ? fmt::format(" expert {}", expert) : "";
  return fmt::format("{}{}: {} ({} bytes at {} of {})", tensor, of_expert, what, bytes, offset, file);
}

Result<VerifyReport> verify_model(const Catalog& catalog, Device& device, const WorkProgress& on_progress) {
  return Verifier(catalog, device, on_progress).run();
}

}  // namespace sluice
