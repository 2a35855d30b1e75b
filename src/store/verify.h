// Reads a whole model and says which of its tensors cannot be what they should be.
//
// Pack     every byte of every tensor is compared with its checksum.
// GGUF     has no checksums: seen are values that are no numbers (as llama.cpp's --check-tensors; ggml adds a line that
//          names the block), and experts of which a long stretch was never written and reads as zeros. Zeros that
//          stand at the same place in every expert are the model's own padding.
// Errors   those of reading (kDeviceError, kShortRead, kCancelled). Damage is no error but a line of the report.
// Threads  one caller; `device` has its own.
// Cost     the drive's speed, or a core's: some GB/s.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/work_progress.h"
#include "io/device.h"
#include "store/catalog.h"

namespace sluice {

// From this many bytes on, zeros inside an expert are a hole.
inline constexpr uint64_t kZeroRunBytesMin = 64 * 1024;

struct Damage {
  std::string tensor;
  int64_t expert = -1;  // -1: no expert's, or of the whole tensor
  std::string file;
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;
  std::string what;

  std::string message() const;  // one line
};

struct VerifyReport {
  uint64_t bytes = 0;
  uint64_t n_tensor = 0;
  uint64_t n_slab = 0;  // experts' matrices
  bool checksums = false;
  std::vector<Damage> damages;
  std::vector<std::string> padded;  // tensors with zeros at the same place in every expert
};

Result<VerifyReport> verify_model(const Catalog& catalog, Device& device, const WorkProgress& on_progress);

}  // namespace sluice
