#include "base/log.h"
#include "io/device.h"
#include "io/pread_device.h"
#include "io/synthetic_device.h"
#include "io/uring_device.h"

namespace sluice {

namespace {

Result<std::unique_ptr<Device>> open_uring([[maybe_unused]] const DeviceOptions& options) {
#ifdef SLUICE_HAVE_URING
  return UringDevice::open(options.depth, options.register_files);
#else
  return make_error(ErrorCode::kUnsupported, "this build has no io_uring; build it where liburing is installed");
#endif
}

}  // namespace

Result<IoPath> parse_io_path(const std::string& text) {
  if (text == "auto") return IoPath::kAuto;
  if (text == "io_uring") return IoPath::kUring;
  if (text == "pread") return IoPath::kPread;
  if (text == "synthetic") return IoPath::kSynthetic;
  return make_error(ErrorCode::kBadArgument, "I/O path: wanted auto, io_uring, pread or synthetic, given '{}'", text);
}

Result<std::unique_ptr<Device>> open_device(const DeviceOptions& options) {
  if (options.depth == 0 || options.depth > DeviceOptions::kDepthMax) {
    return make_error(ErrorCode::kBadArgument, "I/O depth: wanted 1 to {} reads in flight, given {}",
                      DeviceOptions::kDepthMax, options.depth);
  }
  if (options.path == IoPath::kSynthetic) return std::unique_ptr<Device>(std::make_unique<SyntheticDevice>());
  if (options.path != IoPath::kPread) {
    Result<std::unique_ptr<Device>> device = open_uring(options);
    if (device.ok() || options.path == IoPath::kUring) return device;
    log_warning_once("reading with a pool of threads: {}", device.error().message());
  }
  return PreadDevice::open(options.depth, options.threads);
}

}  // namespace sluice
