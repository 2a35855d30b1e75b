// Writes a planned model as one GGUF file, as a stream of bounded pieces: nothing in memory grows with the model.
// The zeros are written, not left as holes: a hole costs a disk nothing to read, which would mislead every measurement.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "scale_model/plan.h"

namespace sluice::scale_model {

// The size of the file that will be written.
uint64_t file_bytes(const ScalePlan& plan);

// `progress` learns the tensor bytes written so far. Errors name the file or the tensor.
using Progress = std::function<void(uint64_t bytes_written)>;
Status write_scaled(const Catalog& catalog, const ScalePlan& plan, const std::string& out, const Progress& progress);

}  // namespace sluice::scale_model
