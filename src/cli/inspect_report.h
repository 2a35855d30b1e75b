// What `sluice inspect` shows of a catalog. Pure; opens and reads nothing.
//
// Keys     of the JSON: name, architecture, moe, files[]{path, bytes}, layers, layers_moe[], layers_dense[],
//          layers_nextn[] (some of the layers before, by metadata; those without experts are not called dense),
//          experts, top_k, expert_bytes, dense_bytes, side_tensor_bytes (part of dense_bytes), budget_bytes_min (null
//          for a dense model), expert_layers[]{layer, experts, record_bytes, matrices[]{role, type, n_in, n_out,
//          slab_bytes}, side_tensors[]{name, bytes}}.
// Text     out of the file is shown without its control characters.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "store/catalog.h"

namespace sluice {

// `budget_bytes_min` has no meaning for a dense model.
std::string inspect_text(const Catalog& catalog, uint64_t budget_bytes_min);
nlohmann::json inspect_json(const Catalog& catalog, uint64_t budget_bytes_min);

// Indented, with a line's end. Bytes that are not UTF-8 are replaced: a model's name may hold anything.
std::string inspect_json_text(const nlohmann::json& json);

// "0-2, 5, 7-8" for rising numbers.
std::string number_ranges(const std::vector<uint32_t>& numbers);

}  // namespace sluice
