// The device that a loader reads with: one drive, or, with mirrors, the model's files on several (io/mirror_device.h).
//
// Mirrors  each folder holds copies of all files that experts are read from and of `other_files`, under the same base
//          names, checked here (store/model_copy.h). The sources' files become handles that are aligned to what all
//          copies ask: plan the layout after this, not before.
// Errors   kBadArgument (too many folders), what open_device and open_model_copy say.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/device.h"
#include "io/file.h"
#include "loader/slot_plan.h"

namespace sluice {

struct DriveOptions {
  DeviceOptions io;  // depth and threads are one drive's
  DirectMode direct = DirectMode::kAuto;
  std::vector<std::string> mirrors;  // folders
};

Result<std::unique_ptr<Device>> open_drives(const DriveOptions& options, std::vector<LayerSource>& sources,
                                            std::span<const std::shared_ptr<const File>> other_files);

}  // namespace sluice
