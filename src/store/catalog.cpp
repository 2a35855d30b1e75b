#include "store/catalog.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/bytes.h"
#include "store/gguf_header.h"

namespace sluice {

namespace {

constexpr uint64_t kLayersMax = 1 << 16;
constexpr uint64_t kPartsMax = UINT16_MAX;  // split.count is a u16

template <typename... Args>
Error bad_file(const std::string& path, fmt::format_string<Args...> format, Args&&... args) {
  return make_error(ErrorCode::kBadFile, "{}: {}", path, fmt::format(format, std::forward<Args>(args)...));
}

// ---- Parts of a split model -------------------------------------------------------------------------------------

// What a part's name says: PREFIX-00002-of-00003.gguf, the number counted from 1.
struct SplitName {
  std::string prefix;  // with its folder
  uint64_t number = 0;
  uint64_t count = 0;

  std::string path_of(uint64_t part_number) const {
    return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, part_number, count);
  }
};

std::optional<uint64_t> parse_digits(std::string_view digits) {
  uint64_t value = 0;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (code != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::optional<SplitName> parse_split_name(const std::string& path) {
  constexpr std::string_view kPattern = "-NNNNN-of-NNNNN.gguf";
  if (path.size() <= kPattern.size()) return std::nullopt;
  const std::string_view tail = std::string_view(path).substr(path.size() - kPattern.size());
  for (size_t i = 0; i < kPattern.size(); ++i) {
    const bool is_digit = tail[i] >= '0' && tail[i] <= '9';
    if (kPattern[i] == 'N' ? !is_digit : tail[i] != kPattern[i]) return std::nullopt;
  }
  const auto number = parse_digits(tail.substr(1, 5));
  const auto count = parse_digits(tail.substr(10, 5));
  if (!number || !count) return std::nullopt;
  return SplitName{path.substr(0, path.size() - kPattern.size()), *number, *count};
}

// The path's own name, else that of the first link on its way to the file that has a part's name: a model cache links
// part names to files named by their hash, a user links a short name to a part.
std::optional<SplitName> find_split_name(std::string path) {
  constexpr int kLinksMax = 40;  // as the kernel
  for (int links = 0; links <= kLinksMax; ++links) {
    if (auto name = parse_split_name(path)) return name;
    std::array<char, PATH_MAX> target{};
    const ssize_t length = readlink(path.c_str(), target.data(), target.size());
    if (length <= 0 || static_cast<size_t>(length) == target.size()) return std::nullopt;
    const std::string_view link(target.data(), static_cast<size_t>(length));
    const size_t slash = path.rfind('/');
    const bool relative = link.front() != '/' && slash != std::string::npos;
    path = relative ? path.substr(0, slash + 1).append(link) : std::string(link);
  }
  return std::nullopt;
}

struct SplitInfo {
  uint64_t number = 1;  // from 1, as in names; split.no counts from 0
  uint64_t count = 1;
  std::optional<uint64_t> n_tensors;  // of the whole model
};

struct Part {
  std::shared_ptr<const File> file;
  GgufHeader header;
  SplitInfo split;
  std::string architecture;  // empty when the part does not say
};

Result<SplitInfo> read_split_info(const gguf_context& context, const std::string& path) {
  SplitInfo split;
  const auto count = find_unsigned(context, "split.count", path);
  if (!count) return count.error();
  if (!*count || **count <= 1) return split;
  if (**count > kPartsMax) return bad_file(path, "key 'split.count': {} parts, at most {}", **count, kPartsMax);
  split.count = **count;

  const auto index = find_unsigned(context, "split.no", path);
  if (!index) return index.error();
  if (!*index) return bad_file(path, "key 'split.no' is missing in a part of a split model");
  if (**index >= split.count) return bad_file(path, "key 'split.no': {}, with {} parts", **index, split.count);
  split.number = **index + 1;

  const auto n_tensors = find_unsigned(context, "split.tensors.count", path);
  if (!n_tensors) return n_tensors.error();
  split.n_tensors = *n_tensors;
  return split;
}

Result<Part> open_part(const std::string& path, DirectMode mode) {
  auto file = File::open(path, mode);
  if (!file) return file.error();
  auto header = read_gguf_header(**file);
  if (!header) return header.error();
  auto split = read_split_info(*header->context, path);
  if (!split) return split.error();
  auto architecture = find_text(*header->context, "general.architecture", path);
  if (!architecture) return architecture.error();
  return Part{*file, std::move(*header), *split, architecture->value_or("")};
}

Error explain_part_error(const Error& error, const std::string& path, uint64_t number, uint64_t count) {
  if (error.system_error == ENOENT) {
    return make_error(ErrorCode::kNotFound, "part {} of {} is missing: {}", number, count, path);
  }
  if (error.system_error == EMFILE || error.system_error == ENFILE) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    return make_error(ErrorCode::kUnsupported,
                      "{}: too many open files at part {} of {}, with a limit of {} (ulimit -n); two for each part are "
                      "wanted",
                      path, number, count, limit.rlim_cur);
  }
  return error;
}

// Whether `part`, found under `path`, is the one that belongs there. `first` is part 1.
Status check_part(const Part& part, const std::string& path, uint64_t number, uint64_t count, const Part& first) {
  if (part.split.count != count) {
    return bad_file(path, "split.count says {} parts, the name says {}", part.split.count, count);
  }
  if (part.split.number != number) {
    return bad_file(path, "split.no {} makes it part {}, the name says part {}", part.split.number - 1,
                    part.split.number, number);
  }
  if (part.split.n_tensors != first.split.n_tensors) {
    const auto text = [](std::optional<uint64_t> n) { return n ? fmt::format("{}", *n) : std::string("nothing"); };
    return bad_file(path, "a part of another model: split.tensors.count says {}, in part 1 {}",
                    text(part.split.n_tensors), text(first.split.n_tensors));
  }
  if (!part.architecture.empty() && !first.architecture.empty() && part.architecture != first.architecture) {
    return bad_file(path, "a part of another model: architecture '{}', in part 1 '{}'", printable(part.architecture),
                    printable(first.architecture));
  }
  return {};
}

// All parts in order; one for a model that is not split. Only the first keeps its metadata.
Result<std::vector<Part>> open_parts(const std::string& path, DirectMode mode) {
  std::vector<Part> parts;
  auto given = open_part(path, mode);
  if (!given) return given.error();
  if (given->split.count == 1) {
    parts.push_back(std::move(*given));
    return parts;
  }

  const uint64_t count = given->split.count;
  const uint64_t given_number = given->split.number;
  const auto name = find_split_name(path);
  if (!name) {
    return bad_file(path,
                    "split.count makes it part {} of {}, but its name is not PREFIX-{:05}-of-{:05}.gguf, so the other "
                    "parts cannot be found",
                    given_number, count, given_number, count);
  }
  if (name->count != count || name->number != given_number) {
    return bad_file(path, "split.no and split.count make it part {} of {}, its name says part {} of {}", given_number,
                    count, name->number, name->count);
  }

  raise_descriptor_limit(count);
  for (uint64_t number = 1; number <= count; ++number) {
    const std::string part_path = name->path_of(number);
    if (number == given_number) {
      parts.push_back(std::move(*given));
    } else {
      auto part = open_part(part_path, mode);
      if (!part) return explain_part_error(part.error(), part_path, number, count);
      parts.push_back(std::move(*part));
    }
    const Status status = check_part(parts.back(), part_path, number, count, parts.front());
    if (!status) return status.error();
    if (number > 1) parts.back().header.context.reset();
  }
  return parts;
}

// ---- Tensors and metadata ---------------------------------------------------------------------------------------

Status add_tensors(const std::vector<Part>& parts, Catalog& catalog) {
  std::unordered_map<std::string_view, size_t> part_of;
  uint64_t n_tensors = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string& path = parts[i].file->path();
    catalog.files.push_back(parts[i].file);
    for (const HeaderTensor& tensor : parts[i].header.tensors) {
      const auto [place, is_new] = part_of.emplace(tensor.name, i);
      if (!is_new)
        return bad_file(path, "tensor '{}' stands in part {} too", printable(tensor.name), place->second + 1);
      CatalogTensor entry;
      entry.name = tensor.name;
      entry.type = tensor.type;
      std::copy(std::begin(tensor.ne), std::end(tensor.ne), std::begin(entry.ne));
      entry.range = {static_cast<uint32_t>(i), tensor.offset, tensor.bytes};
      catalog.tensors.push_back(std::move(entry));
      ++n_tensors;
    }
  }
  const std::string& first_path = parts.front().file->path();
  if (n_tensors == 0) return bad_file(first_path, "there are no tensors: not a model");
  const auto announced = parts.front().split.n_tensors;
  if (announced && *announced != n_tensors) {
    return bad_file(first_path, "split.tensors.count says {}, the {} parts hold {}", *announced, parts.size(),
                    n_tensors);
  }
  return {};
}

// The value of ARCHITECTURE.name, 0 when it is missing.
Result<uint64_t> architecture_value(const Part& first, const char* name) {
  const std::string key = fmt::format("{}.{}", first.architecture, name);
  const auto value = find_unsigned(*first.header.context, key, first.file->path());
  if (!value) return value.error();
  if (value->value_or(0) > UINT32_MAX) {
    return bad_file(first.file->path(), "key '{}': {} does not fit into 32 bits", printable(key), **value);
  }
  return value->value_or(0);
}

// llama.cpp ends the process on these; a file must not be able to do that.
Status check_expert_counts(const std::string& path, uint64_t n_expert, uint64_t n_used, uint64_t n_groups,
                           uint64_t n_groups_used) {
  if (n_expert == 0 && n_used == 0 && n_groups == 0) return {};
  if (n_used == 0 || n_used > n_expert) {
    return bad_file(path, "expert_used_count is {}, with {} experts", n_used, n_expert);
  }
  if (n_groups >= n_expert || (n_groups > 1 && n_expert % n_groups != 0)) {
    return bad_file(path, "expert_group_count is {}, with {} experts", n_groups, n_expert);
  }
  if (n_groups > 1 && (n_groups_used == 0 || n_groups_used >= n_groups)) {
    return bad_file(path, "expert_group_used_count is {}, with {} groups", n_groups_used, n_groups);
  }
  return {};
}

Status read_metadata(const Part& first, Catalog& catalog) {
  const std::string& path = first.file->path();
  catalog.architecture = first.architecture;
  if (catalog.architecture.empty()) return bad_file(path, "key 'general.architecture' is missing");
  const auto name = find_text(*first.header.context, "general.name", path);
  if (!name) return name.error();
  catalog.name = name->value_or("");

  constexpr std::array kNames = {"block_count",       "nextn_predict_layers", "expert_count",
                                 "expert_used_count", "expert_group_count",   "expert_group_used_count"};
  std::array<uint64_t, kNames.size()> values{};
  for (size_t i = 0; i < kNames.size(); ++i) {
    const auto value = architecture_value(first, kNames[i]);
    if (!value) return value.error();
    values[i] = *value;
  }
  const auto [n_layer, n_layer_nextn, n_expert, n_expert_used, n_groups, n_groups_used] = values;
  if (n_layer == 0 || n_layer > kLayersMax) {
    return bad_file(path, "key '{}.block_count': wanted 1 to {}, found {}", printable(catalog.architecture), kLayersMax,
                    n_layer);
  }
  if (n_layer_nextn > n_layer) {
    return bad_file(path, "nextn_predict_layers is {}, with {} layers", n_layer_nextn, n_layer);
  }
  const Status counts = check_expert_counts(path, n_expert, n_expert_used, n_groups, n_groups_used);
  if (!counts) return counts;

  catalog.n_layer = static_cast<uint32_t>(n_layer);
  catalog.n_layer_nextn = static_cast<uint32_t>(n_layer_nextn);
  catalog.n_expert = static_cast<uint32_t>(n_expert);
  catalog.n_expert_used = static_cast<uint32_t>(n_expert_used);
  return {};
}

// ---- Experts ----------------------------------------------------------------------------------------------------

// The layer of "blk.LAYER.REST".
std::optional<uint32_t> layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const auto layer = parse_digits(name.substr(0, name.find('.')));
  if (!layer || *layer > UINT32_MAX) return std::nullopt;
  return static_cast<uint32_t>(*layer);
}

Result<ExpertMatrix> expert_matrix(const CatalogTensor& tensor, MatrixRole role, const std::string& path) {
  if (tensor.ne[3] != 1) return bad_file(path, "tensor '{}': an expert tensor of 4 dimensions", tensor.name);
  if (tensor.ne[2] > UINT32_MAX) return bad_file(path, "tensor '{}': {} experts", tensor.name, tensor.ne[2]);
  ExpertMatrix matrix;
  matrix.role = role;
  matrix.shape = {tensor.type, tensor.ne[0], tensor.ne[1], tensor.ne[2],
                  ggml_row_size(tensor.type, tensor.ne[0]) * static_cast<uint64_t>(tensor.ne[1])};
  SLUICE_ASSERT(matrix.shape.total_bytes() == tensor.range.bytes, "{}: {} bytes, experts add up to {}", tensor.name,
                tensor.range.bytes, matrix.shape.total_bytes());
  return matrix;
}

const ExpertMatrix* find_matrix(const ExpertLayer& layer, MatrixRole role) {
  for (const ExpertMatrix& matrix : layer.matrices) {
    if (matrix.role == role) return &matrix;
  }
  return nullptr;
}

// That the matrices make up an FFN: hidden -> ff by gate and up (or both at once), ff -> hidden by down.
Status check_expert_layer(const ExpertLayer& layer, const Catalog& catalog) {
  const std::string& path = catalog.files[layer.spans.front().file]->path();
  const auto refuse = [&](const std::string& what) { return bad_file(path, "layer {}: {}", layer.layer, what); };
  if (layer.layer >= catalog.n_layer) return refuse(fmt::format("has experts, but block_count is {}", catalog.n_layer));
  if (layer.n_expert > catalog.n_expert) {
    return refuse(fmt::format("has {} experts, but expert_count is {}", layer.n_expert, catalog.n_expert));
  }

  const ExpertMatrix* gate = find_matrix(layer, MatrixRole::kGate);
  const ExpertMatrix* up = find_matrix(layer, MatrixRole::kUp);
  const ExpertMatrix* gate_up = find_matrix(layer, MatrixRole::kGateUp);
  const ExpertMatrix* down = find_matrix(layer, MatrixRole::kDown);
  if (down == nullptr) return refuse("ffn_down_exps is missing");
  if (gate_up == nullptr && up == nullptr) return refuse("neither ffn_up_exps nor ffn_gate_up_exps is there");
  if (gate_up != nullptr && (gate != nullptr || up != nullptr)) {
    return refuse("ffn_gate_up_exps stands beside ffn_gate_exps or ffn_up_exps");
  }

  const int64_t n_hidden = down->shape.n_out;
  const int64_t n_ff = down->shape.n_in;
  for (const ExpertMatrix& matrix : layer.matrices) {
    const ExpertTensorShape& shape = matrix.shape;
    const char* role = matrix_role_name(matrix.role);
    if (shape.n_expert != layer.n_expert) {
      return refuse(fmt::format("ffn_{}_exps has {} experts, another matrix {}", role, shape.n_expert, layer.n_expert));
    }
    if (matrix.role == MatrixRole::kDown) continue;
    // Halved instead of doubled: 2 * n_ff could overflow.
    const bool fused = matrix.role == MatrixRole::kGateUp;
    const bool fits = fused ? shape.n_out % 2 == 0 && shape.n_out / 2 == n_ff : shape.n_out == n_ff;
    if (shape.n_in != n_hidden || !fits) {
      return refuse(fmt::format("ffn_{}_exps is {} x {}, which does not fit ffn_down_exps of {} x {}", role, shape.n_in,
                                shape.n_out, n_ff, n_hidden));
    }
  }
  return {};
}

Status group_experts(Catalog& catalog) {
  std::map<uint32_t, ExpertLayer> layers;
  for (const CatalogTensor& tensor : catalog.tensors) {
    const auto name = parse_expert_tensor_name(tensor.name);
    uint64_t& sum = name ? catalog.expert_bytes : catalog.dense_bytes;
    const std::string& path = catalog.files[tensor.range.file]->path();
    const auto added = checked_add(sum, tensor.range.bytes);
    if (!added) return bad_file(path, "the parts' sizes add up to more than 2^64 bytes");
    sum = *added;
    if (!name) continue;

    auto matrix = expert_matrix(tensor, name->role, path);
    if (!matrix) return matrix.error();
    ExpertLayer& layer = layers[name->layer];
    if (find_matrix(layer, name->role) != nullptr) {
      return bad_file(path, "layer {} has two tensors ffn_{}_exps", name->layer, matrix_role_name(name->role));
    }
    layer.layer = name->layer;
    if (layer.matrices.empty()) layer.n_expert = static_cast<uint32_t>(matrix->shape.n_expert);
    matrix->span = static_cast<uint32_t>(layer.spans.size());
    layer.spans.push_back({.file = tensor.range.file,
                           .offset = tensor.range.offset,
                           .stride_bytes = matrix->shape.slab_bytes,
                           .bytes = matrix->shape.slab_bytes});
    layer.matrices.push_back(*matrix);
  }
  for (const CatalogTensor& tensor : catalog.tensors) {
    const auto layer = is_expert_side_tensor_name(tensor.name) ? layer_of(tensor.name) : std::nullopt;
    const auto found = layer ? layers.find(*layer) : layers.end();
    if (found != layers.end()) found->second.side_tensors.push_back(tensor.name);
  }
  for (auto& [number, layer] : layers) {
    std::sort(layer.matrices.begin(), layer.matrices.end(),
              [](const ExpertMatrix& a, const ExpertMatrix& b) { return a.role < b.role; });
    const Status status = check_expert_layer(layer, catalog);
    if (!status) return status;
    catalog.expert_layers.push_back(std::move(layer));
  }
  return {};
}

// ---- Packs ------------------------------------------------------------------------------------------------------

// That a pack's layer holds the very matrices that model.gguf announces; then the layer is read from the pack.
Status attach_layer(const File& file, const PackLayer& packed, ExpertLayer& layer, uint32_t file_index) {
  const auto refuse = [&](const std::string& what) {
    return make_error(ErrorCode::kBadFile, "{}: layer {}: {}", file.path(), layer.layer, what);
  };
  if (packed.n_expert != layer.n_expert) {
    return refuse(fmt::format("{} experts, {} says {}", packed.n_expert, kPackModelName, layer.n_expert));
  }
  if (packed.n_matrix != layer.matrices.size()) {
    return refuse(fmt::format("{} matrices, {} has {}", packed.n_matrix, kPackModelName, layer.matrices.size()));
  }
  for (size_t i = packed.n_matrix; i < packed.segments.size(); ++i) {
    const std::string& name = packed.segments[i].name;
    const auto& known = layer.side_tensors;
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return refuse(fmt::format("'{}' is no tensor of the layer in {}", printable(name), kPackModelName));
    }
  }
  auto checksums = std::make_shared<std::vector<uint64_t>>(packed.n_expert * layer.matrices.size());
  for (size_t i = 0; i < layer.matrices.size(); ++i) {
    ExpertMatrix& matrix = layer.matrices[i];
    const std::string name = expert_tensor_name({layer.layer, matrix.role});
    const auto segment = std::find_if(packed.segments.begin(), packed.segments.end(),
                                      [&](const PackSegment& candidate) { return candidate.name == name; });
    if (segment == packed.segments.end()) return refuse(fmt::format("no segment '{}'", name));
    if (segment->type != matrix.shape.type || segment->ne0 != matrix.shape.n_in || segment->ne1 != matrix.shape.n_out) {
      return refuse(fmt::format("'{}' has another type or shape than in {}", name, kPackModelName));
    }
    matrix.span = 0;
    matrix.offset = segment->offset;
    matrix.native = segment->native;
    const auto column = static_cast<size_t>(segment - packed.segments.begin());
    for (uint32_t expert = 0; expert < packed.n_expert; ++expert) {
      (*checksums)[expert * layer.matrices.size() + i] = packed.checksum(expert, column);
    }
  }
  layer.spans = {{.file = file_index,
                  .offset = packed.record_offset,
                  .stride_bytes = packed.record_stride_bytes,
                  .bytes = packed.read_bytes}};
  layer.checksums = std::move(checksums);
  return {};
}

// If the first file says that it is a pack's, the experts are those of the file beside it.
Status attach_pack(const Part& first, DirectMode mode, Catalog& catalog) {
  const std::string& path = first.file->path();
  const auto id = find_text(*first.header.context, kPackIdKey, path);
  if (!id) return id.error();
  if (!*id) return {};
  // Beside the file itself, not beside a link to it.
  std::error_code failed;
  const std::filesystem::path real = std::filesystem::canonical(path, failed);
  const std::string experts_path = ((failed ? std::filesystem::path(path) : real).parent_path() / kPackExpertsName).string();
  auto file = File::open(experts_path, mode);
  if (!file) {
    if (file.error().system_error != ENOENT) return file.error();
    return make_error(ErrorCode::kNotFound, "{}: this pack's experts are missing: no {}", path, experts_path);
  }
  auto index = read_pack_index(**file);
  if (!index) return index.error();
  if (index->id.text() != **id) {
    return bad_file(experts_path, "experts of another pack: id {}, {} wants {}", index->id.text(), path, printable(**id));
  }
  if (index->layers.size() != catalog.expert_layers.size()) {
    return bad_file(experts_path, "experts of {} layers, {} has {}", index->layers.size(), path, catalog.expert_layers.size());
  }
  const size_t n_dense = static_cast<size_t>(std::count_if(catalog.tensors.begin(), catalog.tensors.end(), [](const auto& tensor) {
    return !parse_expert_tensor_name(tensor.name);
  }));
  if (index->dense_checksums.size() != n_dense) {
    return bad_file(experts_path, "checksums of {} dense tensors, {} has {}", index->dense_checksums.size(), path, n_dense);
  }
  const uint32_t file_index = static_cast<uint32_t>(catalog.files.size());
  for (size_t i = 0; i < index->layers.size(); ++i) {
    ExpertLayer& layer = catalog.expert_layers[i];
    if (index->layers[i].layer != layer.layer) {
      return bad_file(experts_path, "experts of layer {}, {} has them in layer {}", index->layers[i].layer, path, layer.layer);
    }
    if (Status status = attach_layer(**file, index->layers[i], layer, file_index); !status) return status;
  }
  catalog.files.push_back(*file);
  catalog.pack = std::make_shared<const PackIndex>(std::move(*index));
  return {};
}

}  // namespace

uint64_t ExpertLayer::record_bytes() const {
  uint64_t bytes = 0;
  for (const ExpertMatrix& matrix : matrices) bytes += matrix.shape.slab_bytes;
  return bytes;
}

Result<bool> is_pack_model(const File& file) {
  const auto header = read_gguf_header(file);
  if (!header) return header.error();
  return gguf_find_key(header->context.get(), kPackIdKey) >= 0;
}

FileRange ExpertLayer::slab_range(const ExpertMatrix& matrix, uint32_t expert) const {
  const ExpertSpan& span = spans[matrix.span];
  return {span.file, span.offset + expert * span.stride_bytes + matrix.offset, matrix.shape.slab_bytes};
}

Status Catalog::read_experts(const ExpertLayer& layer, const ExpertMatrix& matrix, uint64_t offset, void* destination,
                             uint64_t bytes) const {
  SLUICE_ASSERT(offset <= matrix.shape.total_bytes() && bytes <= matrix.shape.total_bytes() - offset,
                "{} bytes at {} of {}", bytes, offset, matrix.shape.total_bytes());
  if (matrix.native) {
    return make_error(ErrorCode::kUnsupported, "{}: holds this tensor in a native layout only; wanted its original bytes",
                      files[layer.spans[matrix.span].file]->path());
  }
  auto* to = static_cast<std::byte*>(destination);
  while (bytes > 0) {
    const uint64_t inside = offset % matrix.shape.slab_bytes;
    const uint64_t step = std::min(bytes, matrix.shape.slab_bytes - inside);
    const FileRange slab = layer.slab_range(matrix, static_cast<uint32_t>(offset / matrix.shape.slab_bytes));
    if (Status status = files[slab.file]->read_exactly(slab.offset + inside, to, step); !status) return status;
    to += step;
    offset += step;
    bytes -= step;
  }
  return {};
}

Result<Catalog> Catalog::open(const std::string& path, DirectMode mode) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  if (is_folder && !std::filesystem::exists(fmt::format("{}/{}", path, kPackModelName), ignored)) {
    return make_error(ErrorCode::kNotFound, "{}: a folder that is no pack: there is no {} in it", path, kPackModelName);
  }
  const auto parts = open_parts(is_folder ? fmt::format("{}/{}", path, kPackModelName) : path, mode);
  if (!parts) return parts.error();
  Catalog catalog;
  Status status = read_metadata(parts->front(), catalog);
  if (status) status = add_tensors(*parts, catalog);
  if (status) status = group_experts(catalog);
  if (status) status = attach_pack(parts->front(), mode, catalog);
  if (!status) return status.error();
  return catalog;
}

}  // namespace sluice
