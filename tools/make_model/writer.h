// Writes a planned model as one GGUF file or as a set of parts, as a stream: the metadata first, then every tensor's
// bytes as they are made. Parts carry llama.cpp's names (PREFIX-00001-of-00003.gguf) and split.* keys.
//
// A file stands under its own name only when it is complete; until then it ends in ".tmp", and after an error it is
// gone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "make_model/plan.h"
#include "make_model/weights.h"

namespace sluice::make_model {

// The files that a model becomes. With one part, `out` itself.
std::vector<std::string> part_paths(const std::string& out, uint32_t part_count);

// `progress` learns the tensor bytes written so far, after every piece. Errors name the file; kBadArgument if there are
// more parts than tensors.
using Progress = std::function<void(uint64_t bytes_written)>;
Status write_model(const ModelPlan& plan, WeightMaker& weights, const std::string& out, uint32_t part_count,
                   const Progress& progress);

}  // namespace sluice::make_model
