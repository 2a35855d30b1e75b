#include "cli/inspect_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/bytes.h"
#include "store/gguf_header.h"

namespace sluice {

namespace {

using Rows = std::vector<std::vector<std::string>>;

// Left-aligned columns with two spaces between them.
std::string format_columns(const Rows& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

struct LayerKinds {
  std::vector<uint32_t> moe;    // with routed experts
  std::vector<uint32_t> dense;  // without, nextn layers left out
  std::vector<uint32_t> nextn;
};

LayerKinds layer_kinds(const Catalog& catalog) {
  LayerKinds kinds;
  std::set<uint32_t> with_experts;
  for (const ExpertLayer& layer : catalog.expert_layers) with_experts.insert(layer.layer);
  for (uint32_t layer = 0; layer < catalog.n_layer; ++layer) {
    const bool is_nextn = layer >= catalog.n_layer - catalog.n_layer_nextn;
    if (with_experts.contains(layer)) kinds.moe.push_back(layer);
    if (is_nextn) kinds.nextn.push_back(layer);
    if (!is_nextn && !with_experts.contains(layer)) kinds.dense.push_back(layer);
  }
  return kinds;
}

std::string describe_layers(const Catalog& catalog) {
  const LayerKinds kinds = layer_kinds(catalog);
  std::string text;
  const auto add = [&](const char* kind, const std::vector<uint32_t>& layers) {
    if (layers.empty()) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : "; ", kind, number_ranges(layers));
  };
  add("dense", kinds.dense);
  add("MoE", kinds.moe);
  add("nextn", kinds.nextn);
  return fmt::format("{}: {}", catalog.n_layer, text);
}

std::unordered_map<std::string, uint64_t> side_tensor_sizes(const Catalog& catalog) {
  std::unordered_map<std::string, uint64_t> sizes;
  for (const CatalogTensor& tensor : catalog.tensors) {
    if (is_expert_side_tensor_name(tensor.name)) sizes.emplace(tensor.name, tensor.range.bytes);
  }
  return sizes;
}

uint64_t side_tensor_bytes(const Catalog& catalog) {
  uint64_t bytes = 0;
  for (const auto& [name, size] : side_tensor_sizes(catalog)) bytes += size;
  return bytes;
}

std::string describe_matrices(const ExpertLayer& layer) {
  std::string text;
  for (const ExpertMatrix& matrix : layer.matrices) {
    text += fmt::format("{}{} {} {}x{}", text.empty() ? "" : ", ", matrix_role_name(matrix.role),
                        ggml_type_name(matrix.shape.type), matrix.shape.n_in, matrix.shape.n_out);
  }
  return text;
}

// Layers alike in experts, types and shapes share a row; the first such layer decides the order.
std::string expert_table(const Catalog& catalog) {
  using Group = std::pair<const ExpertLayer*, std::vector<uint32_t>>;
  std::vector<Group> groups;
  std::unordered_map<std::string, size_t> group_of;
  for (const ExpertLayer& layer : catalog.expert_layers) {
    const std::string key = fmt::format("{} {}", layer.n_expert, describe_matrices(layer));
    const auto [place, is_new] = group_of.emplace(key, groups.size());
    if (is_new) groups.push_back({&layer, {}});
    groups[place->second].second.push_back(layer.layer);
  }
  Rows rows = {{"MoE layers", "experts", "one expert", "each layer", "matrices (in x out)"}};
  for (const auto& [layer, numbers] : groups) {
    const uint64_t record_bytes = layer->record_bytes();
    rows.push_back({number_ranges(numbers), fmt::format("{}", layer->n_expert), format_bytes(record_bytes),
                    format_bytes(record_bytes * layer->n_expert), describe_matrices(*layer)});
  }
  return format_columns(rows);
}

// One row for a kind of side tensor, over all layers that have it.
std::string side_tensor_table(const Catalog& catalog) {
  struct Group {
    std::vector<uint32_t> layers;
    uint64_t bytes = 0;
  };
  const auto sizes = side_tensor_sizes(catalog);
  std::map<std::string, Group> groups;
  for (const ExpertLayer& layer : catalog.expert_layers) {
    for (const std::string& name : layer.side_tensors) {
      Group& group = groups[name.substr(name.find(".ffn_") + 1)];
      group.layers.push_back(layer.layer);
      group.bytes += sizes.at(name);
    }
  }
  if (groups.empty()) return "";
  Rows rows = {{"side tensors (resident)", "all layers", "layers"}};
  for (const auto& [name, group] : groups)
    rows.push_back({name, format_bytes(group.bytes), number_ranges(group.layers)});
  return "\n" + format_columns(rows);
}

std::string share_of(uint64_t part, uint64_t whole) {
  return fmt::format("{:.1f} %", whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

std::string number_ranges(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

std::string inspect_text(const Catalog& catalog, uint64_t budget_bytes_min) {
  uint64_t file_bytes = 0;
  for (const auto& file : catalog.files) file_bytes += file->size_bytes();
  const uint64_t tensor_bytes = catalog.expert_bytes + catalog.dense_bytes;

  Rows rows = {{"name", catalog.name.empty() ? "-" : printable(catalog.name)},
               {"architecture", printable(catalog.architecture)},
               {"files", fmt::format("{}, {}", catalog.files.size(), format_bytes(file_bytes))}};
  for (const auto& file : catalog.files) rows.push_back({"", file->path()});
  rows.push_back({"layers", describe_layers(catalog)});
  if (catalog.is_moe()) {
    rows.push_back({"experts", fmt::format("{}, top-k {}", catalog.n_expert, catalog.n_expert_used)});
    rows.push_back({"expert bytes", fmt::format("{} ({}), streamed", format_bytes(catalog.expert_bytes),
                                                share_of(catalog.expert_bytes, tensor_bytes))});
  }
  rows.push_back({"dense bytes", fmt::format("{} ({}), resident", format_bytes(catalog.dense_bytes),
                                             share_of(catalog.dense_bytes, tensor_bytes))});
  if (!catalog.is_moe()) {
    const std::string why = catalog.n_expert == 0
                                ? std::string("a dense model")
                                : fmt::format("{} experts, but no blk.N.ffn_*_exps.weight tensors", catalog.n_expert);
    return format_columns(rows) + fmt::format("\n{}: there is nothing to stream\n", why);
  }
  const uint64_t side_bytes = side_tensor_bytes(catalog);
  if (side_bytes > 0) rows.push_back({"", fmt::format("{} of them side tensors", format_bytes(side_bytes))});
  rows.push_back({"smallest budget", format_bytes(budget_bytes_min)});
  return format_columns(rows) + "\n" + expert_table(catalog) + side_tensor_table(catalog);
}

nlohmann::json inspect_json(const Catalog& catalog, uint64_t budget_bytes_min) {
  const LayerKinds kinds = layer_kinds(catalog);
  nlohmann::json json = {
      {"name", catalog.name},
      {"architecture", catalog.architecture},
      {"moe", catalog.is_moe()},
      {"files", nlohmann::json::array()},
      {"layers", catalog.n_layer},
      {"layers_moe", kinds.moe},
      {"layers_dense", kinds.dense},
      {"layers_nextn", kinds.nextn},
      {"experts", catalog.n_expert},
      {"top_k", catalog.n_expert_used},
      {"expert_bytes", catalog.expert_bytes},
      {"dense_bytes", catalog.dense_bytes},
      {"side_tensor_bytes", side_tensor_bytes(catalog)},
      {"budget_bytes_min", nullptr},
      {"expert_layers", nlohmann::json::array()},
  };
  if (catalog.is_moe()) json["budget_bytes_min"] = budget_bytes_min;
  for (const auto& file : catalog.files) {
    json["files"].push_back({{"path", file->path()}, {"bytes", file->size_bytes()}});
  }
  const auto sizes = side_tensor_sizes(catalog);
  for (const ExpertLayer& layer : catalog.expert_layers) {
    nlohmann::json entry = {{"layer", layer.layer},
                            {"experts", layer.n_expert},
                            {"record_bytes", layer.record_bytes()},
                            {"matrices", nlohmann::json::array()},
                            {"side_tensors", nlohmann::json::array()}};
    for (const ExpertMatrix& matrix : layer.matrices) {
      entry["matrices"].push_back({{"role", matrix_role_name(matrix.role)},
                                   {"type", ggml_type_name(matrix.shape.type)},
                                   {"n_in", matrix.shape.n_in},
                                   {"n_out", matrix.shape.n_out},
                                   {"slab_bytes", matrix.shape.slab_bytes}});
    }
    for (const std::string& name : layer.side_tensors) {
      entry["side_tensors"].push_back({{"name", name}, {"bytes", sizes.at(name)}});
    }
    json["expert_layers"].push_back(std::move(entry));
  }
  return json;
}

std::string inspect_json_text(const nlohmann::json& json) {
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace sluice
