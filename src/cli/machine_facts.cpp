#include "cli/machine_facts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "base/bytes.h"

namespace sluice {

namespace {

std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

}  // namespace

std::string processor_name(const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view kKey = "model name";
    const size_t colon = line.find(':');
    if (!line.starts_with(kKey) || colon == std::string::npos) continue;
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown";
}

EnergyMeter::EnergyMeter(const std::string& root) {
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/sys/class/powercap", failed)) {
    // "intel-rapl:0" is a package (AMD's too), "intel-rapl:0:0" a part of it.
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("intel-rapl:") || std::ranges::count(name, ':') != 1) continue;
    const std::string folder = entry.path().string();
    const auto now = read_number(folder + "/energy_uj");
    const auto wrap = read_number(folder + "/max_energy_range_uj");
    if (now && wrap) packages_.push_back({.counter_path = folder + "/energy_uj", .wrap_uj = *wrap, .last_uj = *now});
  }
}

std::optional<double> EnergyMeter::joules_since_last() {
  if (packages_.empty()) return std::nullopt;
  double joules = 0;
  for (Package& package : packages_) {
    const auto now = read_number(package.counter_path);
    if (!now) return std::nullopt;
    const uint64_t used_uj =
        *now >= package.last_uj ? *now - package.last_uj : *now + package.wrap_uj - package.last_uj;
    joules += static_cast<double>(used_uj) * 1e-6;
    package.last_uj = *now;
  }
  return joules;
}

Result<double> cached_share(const File& file) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t bytes = file.size_bytes();
  if (bytes == 0) return 0.0;
  void* address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (address == MAP_FAILED) {
    return make_system_error(ErrorCode::kUnsupported, errno, "cannot map '{}'", file.path());
  }
  std::vector<unsigned char> pages((bytes + page_bytes - 1) / page_bytes);
  const int told = mincore(address, bytes, pages.data());
  const int reason = errno;
  munmap(address, bytes);
  if (told != 0) return make_system_error(ErrorCode::kUnsupported, reason, "mincore of '{}'", file.path());
  const auto cached = std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
  return static_cast<double>(cached) / static_cast<double>(pages.size());
}

void drop_cache(const File& file) {
  // Pages that are still to be written would stay.
  (void)fdatasync(file.fd());
#ifdef POSIX_FADV_DONTNEED
  (void)posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
#endif
}

bool reset_peak_rss() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5";
  file.flush();
  return file.good();
}

}  // namespace sluice
