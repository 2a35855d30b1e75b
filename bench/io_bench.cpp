// io_bench FILE [flags]: random reads of one size at one depth through io/device.h, as the loader makes them: into slot
// memory, with direct I/O, always `depth` reads under way. One JSON object on standard output. bench/io_compare runs it
// in turn with fio.
//
// CPU      of the whole process, kernel time included, while reads were made. Interrupts of the drive are nobody's.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "io/device.h"
#include "io/file.h"
#include "pool/slot_memory.h"

namespace sluice {
namespace {

struct Options {
  std::string file;
  std::string path = "auto";
  std::string direct = "on";
  uint64_t record_bytes = kMiB;
  unsigned depth = 8;
  double seconds = 3;
  uint64_t seed = 1;
  bool register_files = true;
  bool register_memory = false;
};

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Result<nlohmann::json> measure(const Options& options) {
  const auto direct = parse_direct_mode(options.direct);
  if (!direct) return direct.error();
  const auto path = parse_io_path(options.path);
  if (!path) return path.error();
  const auto opened = File::open(options.file, *direct);
  if (!opened) return opened.error();
  const File& file = **opened;
  if (options.record_bytes % file.align_bytes() != 0) {
    return make_error(ErrorCode::kBadArgument, "--bytes: wanted a multiple of {}, given {}", file.align_bytes(),
                      options.record_bytes);
  }
  const uint64_t n_place = file.size_bytes() / options.record_bytes;
  if (n_place == 0) return make_error(ErrorCode::kBadFile, "'{}' is smaller than one record", options.file);
  auto device = open_device({.path = *path, .depth = options.depth, .register_files = options.register_files});
  if (!device) return device.error();
  const auto memory = SlotMemory::create(options.record_bytes * options.depth);
  if (!memory) return memory.error();
  if (options.register_memory) (*device)->register_memory({memory.value().data(), memory.value().bytes()});

  std::mt19937_64 random(options.seed);
  const auto submit = [&](uint64_t slot) {
    (*device)->submit({.file = &file,
                       .offset = random() % n_place * options.record_bytes,
                       .bytes = options.record_bytes,
                       .bytes_needed = options.record_bytes,
                       .destination = memory.value().data() + slot * options.record_bytes,
                       .tag = slot});
  };
  std::vector<ReadCompletion> completions;
  uint64_t reads = 0;
  double cpu_begin = 0;
  int64_t begin_ns = 0;
  const auto run = [&](double seconds) {
    reads = 0;
    cpu_begin = cpu_seconds();
    begin_ns = now_ns();
    while (seconds_of(now_ns() - begin_ns) < seconds) {
      completions.clear();
      (*device)->wait(completions);
      for (const ReadCompletion& completion : completions) {
        if (!completion.status.ok()) return completion.status;
        submit(completion.tag);
        ++reads;
      }
    }
    return Status();
  };
  for (uint64_t slot = 0; slot < options.depth; ++slot) submit(slot);
  // The first reads also fault the slots in.
  if (Status status = run(options.seconds / 10); !status) return status.error();
  if (Status status = run(options.seconds); !status) return status.error();
  const double seconds = seconds_of(now_ns() - begin_ns);
  const double cpu = cpu_seconds() - cpu_begin;
  const double bytes = static_cast<double>(reads * options.record_bytes);
  return nlohmann::json{{"path", (*device)->name()},
                        {"direct", file.direct()},
                        {"bytes", options.record_bytes},
                        {"depth", options.depth},
                        {"reads", reads},
                        {"mb_per_s", bytes / 1e6 / seconds},
                        {"cpu_s_per_gib", bytes == 0 ? 0 : cpu / (bytes / static_cast<double>(kGiB))},
                        {"cpu_us_per_read", reads == 0 ? 0 : cpu * 1e6 / static_cast<double>(reads)}};
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  CLI::App app{"Random reads of one size at one depth, as the engine makes them."};
  sluice::Options options;
  app.add_option("file", options.file, "File to read")->required();
  app.add_option("--path", options.path, "auto, io_uring or pread")->capture_default_str();
  app.add_option("--direct", options.direct, "auto, on or off")->capture_default_str();
  app.add_option("--bytes", options.record_bytes, "Bytes of one read")
      ->check(CLI::Range(uint64_t{512}, uint64_t{1} << 30))
      ->capture_default_str();
  app.add_option("--depth", options.depth, "Reads under way at once")
      ->check(CLI::Range(1u, sluice::DeviceOptions::kDepthMax))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "Time to measure, after a tenth of it to warm up")
      ->check(CLI::Range(0.01, 3600.0))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of the offsets")->capture_default_str();
  app.add_flag("--register-files,!--no-register-files", options.register_files, "Let the ring know the file");
  app.add_flag("--register-memory", options.register_memory,
               "Let the ring know the memory, as the engine does for staging");
  CLI11_PARSE(app, argc, argv);
  const auto measured = sluice::measure(options);
  if (!measured) {
    fmt::print(stderr, "io_bench: {}\n", measured.error().message());
    return 1;
  }
  fmt::print("{}\n", measured->dump());
  return 0;
}
