#include "loader/drives.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "io/mirror_device.h"
#include "io/pread_device.h"
#include "store/model_copy.h"

namespace sluice {

namespace {

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

Result<std::unique_ptr<Device>> open_drives(const DriveOptions& options, std::vector<LayerSource>& sources,
                                            std::span<const std::shared_ptr<const File>> other_files) {
  if (options.mirrors.empty() || sources.empty()) return open_device(options.io);
  if (options.mirrors.size() + 1 > MirrorDevice::kDrivesMax) {
    return make_error(ErrorCode::kBadArgument, "mirror: wanted at most {} folders, given {}",
                      MirrorDevice::kDrivesMax - 1, options.mirrors.size());
  }
  std::vector<std::string> drives = {folder_of(sources.front().spans.front().file->path())};
  drives.insert(drives.end(), options.mirrors.begin(), options.mirrors.end());

  // In the sources' order, so that the first fault that is told is the same every time.
  std::vector<MirroredFile> files;
  std::map<const File*, size_t> index_of_file;
  for (const LayerSource& source : sources) {
    for (const SpanSource& span : source.spans) {
      if (index_of_file.try_emplace(span.file.get(), files.size()).second) files.push_back({span.file, {}});
    }
  }
  for (const auto& file : other_files) {
    if (index_of_file.try_emplace(file.get(), files.size()).second) files.push_back({file, {}});
  }
  raise_descriptor_limit(files.size() * drives.size());
  for (MirroredFile& file : files) {
    uint64_t align_bytes = file.primary->align_bytes();
    for (const std::string& folder : options.mirrors) {
      auto copy = open_model_copy(*file.primary, folder, options.direct);
      if (!copy) return copy.error();
      align_bytes = std::max(align_bytes, (*copy)->align_bytes());
      file.copies.push_back(std::move(*copy));
    }
    if (align_bytes == file.primary->align_bytes()) continue;
    auto aligned = file.primary->aligned_to(align_bytes);
    if (!aligned) return aligned.error();
    file.primary = std::move(*aligned);
  }
  for (LayerSource& source : sources) {
    for (SpanSource& span : source.spans) span.file = files[index_of_file.at(span.file.get())].primary;
  }

  DeviceOptions io = options.io;
  const auto n_drive = static_cast<unsigned>(drives.size());
  const unsigned threads = io.threads != 0 ? io.threads : std::min(io.depth, PreadDevice::kThreadsDefaultMax);
  io.depth = std::min(io.depth * n_drive, DeviceOptions::kDepthMax);
  io.threads = threads * n_drive;
  auto inner = open_device(io);
  if (!inner) return inner.error();
  return std::unique_ptr<Device>(
      std::make_unique<MirrorDevice>(std::move(*inner), std::move(drives), std::move(files)));
}

}  // namespace sluice
