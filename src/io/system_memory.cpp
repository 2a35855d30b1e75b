#include "io/system_memory.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/log.h"

namespace sluice {

namespace {

// cgroup v1 writes "no limit" as the greatest multiple of the page size below 2^63.
constexpr uint64_t kNoLimitBytesMin = uint64_t{1} << 62;

enum class CgroupVersion { kV1 = 1, kV2 = 2 };

// One cgroup that we are in, directly or through a descendant.
struct Cgroup {
  CgroupVersion version = CgroupVersion::kV2;
  std::string folder;  // where its files are
  std::string name;    // relative to the mount, "/" for the topmost one that we can see
};

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) return std::nullopt;
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

bool contains(const std::vector<std::string>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

template <typename Number>
std::optional<Number> parse_whole(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  Number value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void ignore_malformed(const std::string& path, const std::string& text) {
  log_line(LogLevel::kDebug, fmt::format("'{}' is ignored: '{}' is not what belongs there", path, text.substr(0, 40)));
}

// A file that holds one number. Empty when there is no such file or no number in it.
template <typename Number>
std::optional<Number> read_number(const std::string& path) {
  const auto text = read_text(path);
  if (!text) return std::nullopt;
  const auto value = parse_whole<Number>(*text);
  if (!value) ignore_malformed(path, *text);
  return value;
}

// A file that holds one number of bytes or "max". Empty also when there is no limit.
std::optional<uint64_t> read_limit(const std::string& path) {
  const auto text = read_text(path);
  if (!text || text->starts_with("max")) return std::nullopt;
  const auto value = parse_whole<uint64_t>(*text);
  if (!value) ignore_malformed(path, *text);
  if (value && *value >= kNoLimitBytesMin) return std::nullopt;
  return value;
}

// The number behind `key` in lines of "KEY NUMBER" or "KEY: NUMBER kB".
std::optional<uint64_t> find_number(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    std::string_view rest = std::string_view(line).substr(key.size());
    if (rest.empty() || (rest[0] != ' ' && rest[0] != '\t')) continue;
    const size_t begin = rest.find_first_not_of(" \t");
    if (begin == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(begin);
    return parse_whole<uint64_t>(rest.substr(0, rest.find(' ')));
  }
  return std::nullopt;
}

// mountinfo writes blanks and backslashes in paths as \ooo.
std::string unescape(std::string_view text) {
  const auto is_octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && is_octal(text[i + 1]) && is_octal(text[i + 2]) &&
        is_octal(text[i + 3])) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// Our path in the hierarchy of `controller`, as /proc/self/cgroup has it. Lines are "NUMBER:CONTROLLERS:PATH"; that of
// v2 has number 0 and no controllers.
std::optional<std::string> own_path(const std::string& cgroup_text, CgroupVersion version,
                                    std::string_view controller) {
  std::istringstream lines(cgroup_text);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    const bool ours = version == CgroupVersion::kV2 ? line.starts_with("0:") && controllers.empty()
                                                    : contains(split(controllers, ','), controller);
    if (ours) return line.substr(second + 1);
  }
  return std::nullopt;
}

// `path` seen from a mount that shows the subtree `mount_root`. A path outside of it is that of a container which
// cannot see its own place: the mount's top is then the nearest cgroup above us that can be read.
std::string path_below_mount(const std::string& path, const std::string& mount_root) {
  if (path.find("/..") != std::string::npos) return "/";
  if (mount_root == "/") return path;
  if (!path.starts_with(mount_root)) return "/";
  const std::string below = path.substr(mount_root.size());
  if (below.empty()) return "/";
  return below[0] == '/' ? below : "/";
}

// Every cgroup that bounds `controller` for us, in all hierarchies, innermost first.
std::vector<Cgroup> find_cgroups(const std::string& root, std::string_view controller) {
  std::vector<Cgroup> cgroups;
  const auto cgroup_text = read_text(root + "/proc/self/cgroup");
  const auto mount_text = read_text(root + "/proc/self/mountinfo");
  if (!cgroup_text || !mount_text) return cgroups;

  std::istringstream lines(*mount_text);
  for (std::string line; std::getline(lines, line);) {
    // ID PARENT DEVICE ROOT MOUNT_POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER_OPTIONS
    const auto words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 4) continue;
    const std::string& type = dash[1];
    CgroupVersion version = CgroupVersion::kV2;
    if (type == "cgroup") {
      version = CgroupVersion::kV1;
      if (!contains(split(dash[3], ','), controller)) continue;
    } else if (type != "cgroup2") {
      continue;
    }
    const auto path = own_path(*cgroup_text, version, controller);
    if (!path) continue;

    std::string below = path_below_mount(*path, unescape(words[3]));
    const std::string mount_point = root + unescape(words[4]);
    while (true) {
      cgroups.push_back(Cgroup{version, below == "/" ? mount_point : mount_point + below, below});
      if (below == "/") break;
      const size_t slash = below.rfind('/');
      below = slash == 0 || slash == std::string::npos ? "/" : below.substr(0, slash);
    }
  }
  return cgroups;
}

std::optional<uint64_t> memory_limit(const Cgroup& cgroup) {
  if (cgroup.version == CgroupVersion::kV1) return read_limit(cgroup.folder + "/memory.limit_in_bytes");
  // Above memory.high the kernel slows a process down until it is of no use, so it binds like the hard limit.
  const auto hard = read_limit(cgroup.folder + "/memory.max");
  const auto soft = read_limit(cgroup.folder + "/memory.high");
  if (!hard || !soft) return hard ? hard : soft;
  return std::min(*hard, *soft);
}

// Page cache that belongs to the cgroup and its descendants.
uint64_t reclaimable_bytes(const Cgroup& cgroup) {
  const auto stat = read_text(cgroup.folder + "/memory.stat");
  if (!stat) return 0;
  const bool v1 = cgroup.version == CgroupVersion::kV1;
  const auto inactive = find_number(*stat, v1 ? "total_inactive_file" : "inactive_file");
  const auto active = find_number(*stat, v1 ? "total_active_file" : "active_file");
  if (!inactive || !active) ignore_malformed(cgroup.folder + "/memory.stat", *stat);
  return checked_add(inactive.value_or(0), active.value_or(0)).value_or(0);
}

// What the limit leaves. An unknown usage counts as none, so that the limit itself still binds.
uint64_t bytes_left(const Cgroup& cgroup, uint64_t limit_bytes) {
  const bool v1 = cgroup.version == CgroupVersion::kV1;
  const uint64_t used =
      read_number<uint64_t>(cgroup.folder + (v1 ? "/memory.usage_in_bytes" : "/memory.current")).value_or(0);
  const uint64_t held = used - std::min(used, reclaimable_bytes(cgroup));
  return limit_bytes - std::min(limit_bytes, held);
}

// Cores that the cgroup's quota grants, as a fraction. Empty when it sets none.
std::optional<double> cpu_quota(const Cgroup& cgroup) {
  std::optional<int64_t> quota;
  std::optional<int64_t> period;
  if (cgroup.version == CgroupVersion::kV1) {
    quota = read_number<int64_t>(cgroup.folder + "/cpu.cfs_quota_us");
    period = read_number<int64_t>(cgroup.folder + "/cpu.cfs_period_us");
  } else {
    const std::string path = cgroup.folder + "/cpu.max";
    const auto text = read_text(path);
    if (!text || text->starts_with("max")) return std::nullopt;
    const auto words = split(*text, ' ');
    if (words.size() == 2) {
      quota = parse_whole<int64_t>(words[0]);
      period = parse_whole<int64_t>(words[1]);
    }
    if (!quota || !period) ignore_malformed(path, *text);
  }
  // v1 writes -1 for no quota.
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

unsigned affinity_cpu_count() {
  // The kernel refuses a mask that is shorter than its own; no machine has 2^20 cores.
  for (int cpus = 1024; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* mask = CPU_ALLOC(cpus);
    if (mask == nullptr) break;
    const size_t mask_bytes = CPU_ALLOC_SIZE(cpus);
    const bool known = ::sched_getaffinity(0, mask_bytes, mask) == 0;
    const int count = known ? CPU_COUNT_S(mask_bytes, mask) : 0;
    CPU_FREE(mask);
    if (count > 0) return static_cast<unsigned>(count);
  }
  return 1;
}

// The microseconds behind "total=" in the line "some" of a pressure file.
std::optional<uint64_t> stalled_us(const std::string& path) {
  const auto text = read_text(path);
  if (!text) return std::nullopt;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    const size_t total = line.find(" total=");
    if (line.starts_with("some ") && total != std::string::npos) {
      if (const auto value = parse_whole<uint64_t>(std::string_view(line).substr(total + 7))) return value;
    }
  }
  ignore_malformed(path, *text);
  return std::nullopt;
}

Result<uint64_t> host_available_bytes(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const auto meminfo = read_text(path);
  const auto kib = meminfo ? find_number(*meminfo, "MemAvailable:") : std::nullopt;
  const auto bytes = kib ? checked_mul(*kib, kKiB) : std::nullopt;
  if (!bytes) return make_error(ErrorCode::kUnsupported, "'{}' does not tell how much memory is available", path);
  return *bytes;
}

}  // namespace

Result<SystemMemory> read_system_memory(const std::string& root) {
  const auto host_bytes = host_available_bytes(root);
  if (!host_bytes) return host_bytes.error();
  SystemMemory memory;
  memory.host_available_bytes = *host_bytes;
  memory.available_bytes = *host_bytes;
  memory.bound_by = "host";
  for (const Cgroup& cgroup : find_cgroups(root, "memory")) {
    const auto limit = memory_limit(cgroup);
    if (!limit) continue;
    memory.limit_bytes = std::min(memory.limit_bytes, *limit);
    const uint64_t left = bytes_left(cgroup, *limit);
    if (left < memory.available_bytes) {
      memory.available_bytes = left;
      memory.bound_by = fmt::format("cgroup v{} {}", static_cast<int>(cgroup.version), cgroup.name);
    }
  }
  return memory;
}

MemoryWatch::MemoryWatch(const std::string& root) : root_(root) {
  for (const Cgroup& cgroup : find_cgroups(root, "memory")) {
    limits_.push_back({cgroup.version == CgroupVersion::kV1, cgroup.folder});
    const std::string own_pressure = cgroup.folder + "/memory.pressure";
    // The innermost cgroup comes first; that of the mount's top counts the whole machine where there is nothing above.
    if (cgroup.version == CgroupVersion::kV2 && pressure_path_.empty() && stalled_us(own_pressure)) {
      pressure_path_ = own_pressure;
      pressure_is_own_ = cgroup.name != "/";
    }
  }
  const std::string machine_pressure = root + "/proc/pressure/memory";
  if (pressure_path_.empty() && stalled_us(machine_pressure)) pressure_path_ = machine_pressure;
}

Result<MemorySample> MemoryWatch::sample() const {
  const auto host_bytes = host_available_bytes(root_);
  if (!host_bytes) return host_bytes.error();
  MemorySample sample{.available_bytes = *host_bytes, .stalled_us = 0, .stalls_are_own = pressure_is_own_};
  for (const Limit& limit : limits_) {
    const Cgroup cgroup{limit.v1 ? CgroupVersion::kV1 : CgroupVersion::kV2, limit.folder, ""};
    if (const auto bytes = memory_limit(cgroup)) {
      sample.available_bytes = std::min(sample.available_bytes, bytes_left(cgroup, *bytes));
    }
  }
  if (!pressure_path_.empty()) sample.stalled_us = stalled_us(pressure_path_).value_or(0);
  return sample;
}

unsigned usable_cpu_count(const std::string& root) {
  double count = affinity_cpu_count();
  for (const Cgroup& cgroup : find_cgroups(root, "cpu")) {
    // Whole cores only: a thread too many stops all of them for the rest of each period.
    if (const auto quota = cpu_quota(cgroup)) count = std::min(count, std::floor(*quota));
  }
  return static_cast<unsigned>(std::max(count, 1.0));
}

uint64_t peak_rss_bytes(const std::string& root) {
  // Not getrusage alone: its maximum includes what the process that started us had.
  if (const auto status = read_text(root + "/proc/self/status")) {
    if (const auto peak_kib = find_number(*status, "VmHWM:")) return checked_mul(*peak_kib, kKiB).value_or(0);
  }
  struct rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0 || usage.ru_maxrss < 0) return 0;
  return static_cast<uint64_t>(usage.ru_maxrss) * kKiB;
}

}  // namespace sluice
