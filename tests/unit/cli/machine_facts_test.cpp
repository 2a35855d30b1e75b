#include "cli/machine_facts.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "io/system_memory.h"

namespace sluice {
namespace {

class MachineFacts : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-facts-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = root_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  std::string root_;
};

TEST_F(MachineFacts, ProcessorIsTheFirstModelName) {
  write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU 3000\nprocessor\t: 1\nmodel name\t: Other\n");
  EXPECT_EQ(processor_name(root_), "Some CPU 3000");
}

TEST_F(MachineFacts, ProcessorThatDoesNotSayIsUnknown) {
  EXPECT_EQ(processor_name(root_), "unknown");
}

TEST_F(MachineFacts, EnergyIsTheSumOfPackagesAndSurvivesAWrap) {
  const std::string power = "sys/class/powercap/";
  write(power + "intel-rapl:0/energy_uj", "1000000\n");
  write(power + "intel-rapl:0/max_energy_range_uj", "10000000\n");
  write(power + "intel-rapl:1/energy_uj", "9000000\n");
  write(power + "intel-rapl:1/max_energy_range_uj", "10000000\n");
  write(power + "intel-rapl:0:0/energy_uj", "5\n");  // a part of package 0, which has it already
  write(power + "intel-rapl:0:0/max_energy_range_uj", "10000000\n");
  EnergyMeter meter(root_);
  ASSERT_TRUE(meter.available());
  write(power + "intel-rapl:0/energy_uj", "3500000\n");
  write(power + "intel-rapl:1/energy_uj", "500000\n");
  write(power + "intel-rapl:0:0/energy_uj", "900000\n");
  EXPECT_NEAR(meter.joules_since_last().value_or(-1), 2.5 + 1.5, 1e-9);
  EXPECT_NEAR(meter.joules_since_last().value_or(-1), 0, 1e-9);
}

TEST_F(MachineFacts, EnergyIsNotAvailableWithoutCounters) {
  EnergyMeter meter(root_);
  EXPECT_FALSE(meter.available());
  EXPECT_FALSE(meter.joules_since_last());
}

TEST_F(MachineFacts, ADroppedFileIsNotCachedAndOneThatIsMappedStays) {
  constexpr size_t kBytes = 8 << 20;
  write("file", std::string(kBytes, 'x'));
  const auto file = File::open(root_ + "/file", DirectMode::kOff);
  ASSERT_TRUE(file) << file.error().message();
  std::vector<char> bytes(kBytes);
  ASSERT_TRUE((*file)->read_exactly(0, bytes.data(), bytes.size()));
  const Result<double> full = cached_share(**file);
  ASSERT_TRUE(full) << full.error().message();
  EXPECT_GT(*full, 0.99);

  drop_cache(**file);
  const Result<double> dropped = cached_share(**file);
  ASSERT_TRUE(dropped);
  if (*dropped > 0.5) GTEST_SKIP() << "this file system keeps its pages";
  EXPECT_LT(*dropped, 0.01);

  void* mapped = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED | MAP_POPULATE, (*file)->fd(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  drop_cache(**file);
  const Result<double> held = cached_share(**file);
  munmap(mapped, kBytes);
  ASSERT_TRUE(held);
  EXPECT_GT(*held, 0.99);
}

TEST_F(MachineFacts, PeakCountsFromAReset) {
  // Mapped, because an allocator may keep what is freed.
  constexpr size_t kBytes = 64 << 20;
  void* large = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(large, MAP_FAILED);
  std::memset(large, 'x', kBytes);
  munmap(large, kBytes);
  const uint64_t before = peak_rss_bytes();
  if (!reset_peak_rss()) GTEST_SKIP() << "the system does not let us";
  EXPECT_LT(peak_rss_bytes() + (32 << 20), before);
}

}  // namespace
}  // namespace sluice
