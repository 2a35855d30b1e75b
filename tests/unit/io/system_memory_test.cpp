#include "io/system_memory.h"

#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

constexpr const char* kMeminfo = "MemTotal:       32768 kB\nMemFree:         1024 kB\nMemAvailable:   16384 kB\n";
constexpr uint64_t kHostBytes = 16 * kMiB;

class SystemMemoryTest : public testing::Test {
 protected:
  void SetUp() override { root_.write("proc/meminfo", kMeminfo); }

  void write_v2(const std::string& own_path, const std::string& mount_root = "/") {
    root_.write("proc/self/cgroup", "0::" + own_path + "\n");
    root_.write("proc/self/mountinfo", "20 1 8:1 / / rw - ext4 /dev/root rw\n30 20 0:26 " + mount_root +
                                           " /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw\n");
  }
  void write_v1(const std::string& memory_path, const std::string& mount_root = "/") {
    root_.write("proc/self/cgroup", "5:devices:/elsewhere\n4:memory:" + memory_path + "\n3:cpu,cpuacct:/jobs\n0::/\n");
    root_.write("proc/self/mountinfo",
                "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                "35 31 0:32 " +
                    mount_root + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
                    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  }
  SystemMemory measure() {
    auto memory = read_system_memory(root_.path());
    SLUICE_ASSERT(memory.ok(), "{}", memory.error().message());
    return memory.value();
  }

  TempFolder root_;
};

TEST_F(SystemMemoryTest, HostAloneBinds) {
  const SystemMemory memory = measure();
  EXPECT_EQ(memory.host_available_bytes, kHostBytes);
  EXPECT_EQ(memory.limit_bytes, UINT64_MAX);
  EXPECT_EQ(memory.available_bytes, kHostBytes);
  EXPECT_EQ(memory.bound_by, "host");
}

TEST_F(SystemMemoryTest, UnknownHostMemoryIsAnError) {
  root_.write("proc/meminfo", "MemTotal: 5 kB\n");
  EXPECT_EQ(read_system_memory(root_.path()).error().code, ErrorCode::kUnsupported);
  root_.write("proc/meminfo", "MemAvailable: many kB\n");
  EXPECT_EQ(read_system_memory(root_.path()).error().code, ErrorCode::kUnsupported);
}

TEST_F(SystemMemoryTest, V2CountsPageCacheAsAvailable) {
  write_v2("/app");
  root_.write("sys/fs/cgroup/app/memory.max", "8388608\n");
  root_.write("sys/fs/cgroup/app/memory.current", "7000000\n");
  root_.write("sys/fs/cgroup/app/memory.stat", "anon 1000\nfile 6000000\ninactive_file 4000000\nactive_file 2000000\n");
  const SystemMemory memory = measure();
  EXPECT_EQ(memory.limit_bytes, 8388608u);
  EXPECT_EQ(memory.available_bytes, 8388608u - 1000000u);
  EXPECT_EQ(memory.bound_by, "cgroup v2 /app");
}

TEST_F(SystemMemoryTest, V2AncestorMayBindMoreThanOurOwn) {
  write_v2("/slice/inner/app");
  root_.write("sys/fs/cgroup/slice/inner/app/memory.max", "max\n");
  root_.write("sys/fs/cgroup/slice/inner/memory.max", "9000000\n");
  root_.write("sys/fs/cgroup/slice/inner/memory.current", "10\n");
  root_.write("sys/fs/cgroup/slice/memory.max", "12000000\n");
  root_.write("sys/fs/cgroup/slice/memory.current", "11000000\n");
  const SystemMemory memory = measure();
  EXPECT_EQ(memory.limit_bytes, 9000000u);
  // The wider limit is nearly used up, by a neighbour.
  EXPECT_EQ(memory.available_bytes, 1000000u);
  EXPECT_EQ(memory.bound_by, "cgroup v2 /slice");
}

TEST_F(SystemMemoryTest, V2HighBindsToo) {
  write_v2("/app");
  root_.write("sys/fs/cgroup/app/memory.max", "9000000\n");
  root_.write("sys/fs/cgroup/app/memory.high", "5000000\n");
  root_.write("sys/fs/cgroup/app/memory.current", "0\n");
  EXPECT_EQ(measure().available_bytes, 5000000u);
  root_.write("sys/fs/cgroup/app/memory.max", "max\n");
  EXPECT_EQ(measure().available_bytes, 5000000u);
}

TEST_F(SystemMemoryTest, V2MountThatShowsASubtree) {
  write_v2("/docker/abc/app", "/docker/abc");
  root_.write("sys/fs/cgroup/app/memory.max", "3000000\n");
  root_.write("sys/fs/cgroup/memory.max", "2000000\n");
  EXPECT_EQ(measure().available_bytes, 2000000u);
  // A sibling whose name begins alike is not below the mount; neither is a path that leaves the namespace.
  write_v2("/docker/abcdef/app", "/docker/abc");
  root_.write("sys/fs/cgroupdef/app/memory.max", "1000\n");
  EXPECT_EQ(measure().limit_bytes, 2000000u);
  write_v2("/../other");
  EXPECT_EQ(measure().limit_bytes, 2000000u);
  // The container sees itself at the top.
  write_v2("/", "/docker/abc");
  EXPECT_EQ(measure().limit_bytes, 2000000u);
}

TEST_F(SystemMemoryTest, V2MountPointWithABlank) {
  root_.write("proc/self/cgroup", "0::/\n");
  root_.write("proc/self/mountinfo", "30 20 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n");
  root_.write("my groups/memory.max", "123456\n");
  EXPECT_EQ(measure().limit_bytes, 123456u);
}

TEST_F(SystemMemoryTest, V1UsesTheHierarchicalCounters) {
  write_v1("/jobs/one");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "8000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", "6000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.stat",
              "inactive_file 1\nactive_file 2\ntotal_inactive_file 3000000\ntotal_active_file 1000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "9223372036854771712\n");
  root_.write("sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "9000000\n");
  const SystemMemory memory = measure();
  EXPECT_EQ(memory.limit_bytes, 8000000u);
  EXPECT_EQ(memory.available_bytes, 6000000u);
  EXPECT_EQ(memory.bound_by, "cgroup v1 /jobs/one");
}

TEST_F(SystemMemoryTest, V1AncestorUpToTheMountAndSubtreeMount) {
  write_v1("/jobs/one/deep");
  root_.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
  root_.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
  EXPECT_EQ(measure().available_bytes, 3000000u);
  EXPECT_EQ(measure().bound_by, "cgroup v1 /");
  write_v1("/jobs/one", "/jobs/one");
  EXPECT_EQ(measure().available_bytes, 3000000u);
}

TEST_F(SystemMemoryTest, UsageAboveTheLimitLeavesNothing) {
  write_v2("/app");
  root_.write("sys/fs/cgroup/app/memory.max", "1000\n");
  root_.write("sys/fs/cgroup/app/memory.current", "5000\n");
  EXPECT_EQ(measure().available_bytes, 0u);
  // More cache than usage, as counters that are read one after the other may show: never more than the limit.
  root_.write("sys/fs/cgroup/app/memory.stat", "inactive_file 4000\nactive_file 4000\n");
  EXPECT_EQ(measure().available_bytes, 1000u);
}

TEST_F(SystemMemoryTest, MalformedValuesAreIgnored) {
  write_v2("/app");
  for (const char* text : {"", "\n", "-5\n", "12abc\n", "99999999999999999999999\n", "maximal 5"}) {
    root_.write("sys/fs/cgroup/app/memory.max", text);
    EXPECT_EQ(measure().limit_bytes, UINT64_MAX) << text;
    EXPECT_EQ(measure().bound_by, "host") << text;
  }
  root_.write("sys/fs/cgroup/app/memory.max", "5000\n");
  root_.write("sys/fs/cgroup/app/memory.current", "lots\n");
  root_.write("sys/fs/cgroup/app/memory.stat", "inactive_file x\n\nactive_file\ninactive_filer 5\n");
  EXPECT_EQ(measure().available_bytes, 5000u);
  for (const char* text : {"", "0:\n", "::\n", "garbage", "0"}) {
    root_.write("proc/self/cgroup", text);
    EXPECT_EQ(measure().available_bytes, kHostBytes) << text;
  }
  write_v2("/app");
  for (const char* text : {"", "-\n", "1 2 3 4 5 6 -\n", "1 2 3 4 5 6 - cgroup2\n", "30 - - - - - - cgroup2 a b\n"}) {
    root_.write("proc/self/mountinfo", text);
    EXPECT_EQ(measure().available_bytes, kHostBytes) << text;
  }
}

TEST_F(SystemMemoryTest, CpuQuotaV2) {
  const unsigned all = usable_cpu_count(root_.path());
  ASSERT_GE(all, 1u);
  write_v2("/a/b");
  root_.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), all);
  root_.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), 1u);
  root_.write("sys/fs/cgroup/a/cpu.max", "20000 100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), 1u);
  root_.write("sys/fs/cgroup/a/cpu.max", "100000000 100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), all);
  for (const char* text : {"", "5", "x y", "5 0", "-1 100000"}) {
    root_.write("sys/fs/cgroup/a/cpu.max", text);
    EXPECT_EQ(usable_cpu_count(root_.path()), all) << text;
  }
}

TEST_F(SystemMemoryTest, CpuQuotaV1) {
  const unsigned all = usable_cpu_count(root_.path());
  write_v1("/");
  root_.write("sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us", "-1\n");
  root_.write("sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), all);
  root_.write("sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(usable_cpu_count(root_.path()), 1u);
}

TEST(SystemMemoryReal, ThisMachine) {
  const auto memory = read_system_memory();
  ASSERT_TRUE(memory.ok());
  EXPECT_GT(memory->available_bytes, kMiB);
  EXPECT_LE(memory->available_bytes, memory->host_available_bytes);
  EXPECT_FALSE(memory->bound_by.empty());
  EXPECT_GE(usable_cpu_count(), 1u);
}

TEST(SystemMemoryReal, PeakGrowsWithUse) {
  const uint64_t before = peak_rss_bytes();
  EXPECT_GT(before, 0u);
  std::vector<char> memory(64 * kMiB, 1);
  EXPECT_GE(peak_rss_bytes(), 64 * kMiB);
  EXPECT_GE(peak_rss_bytes(), before);
  EXPECT_EQ(memory.back(), 1);
}

TEST_F(SystemMemoryTest, AWatchSeesALimitThatChanges) {
  write_v1("/jobs/one");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "8000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", "6000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.stat", "total_inactive_file 3000000\ntotal_active_file 0\n");
  const MemoryWatch watch(root_.path());
  EXPECT_EQ(watch.sample()->available_bytes, 5000000u);
  root_.write("sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "5600000\n");
  EXPECT_EQ(watch.sample()->available_bytes, 2600000u);
  root_.write("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "7000000\n");
  root_.write("sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "6900000\n");
  EXPECT_EQ(watch.sample()->available_bytes, 100000u) << "an ancestor that had no limit before";
  root_.write("proc/meminfo", "MemAvailable: 50 kB\n");
  EXPECT_EQ(watch.sample()->available_bytes, 50u * 1024);
}

TEST_F(SystemMemoryTest, AWatchAgreesWithTheMeasurement) {
  write_v2("/slice/app");
  root_.write("sys/fs/cgroup/slice/app/memory.max", "max\n");
  root_.write("sys/fs/cgroup/slice/memory.max", "9000000\n");
  root_.write("sys/fs/cgroup/slice/memory.current", "8500000\n");
  root_.write("sys/fs/cgroup/slice/memory.stat", "inactive_file 400000\nactive_file 0\n");
  EXPECT_EQ(MemoryWatch(root_.path()).sample()->available_bytes, 900000u);
  EXPECT_EQ(measure().available_bytes, 900000u);
  root_.write("sys/fs/cgroup/slice/memory.max", "a lot\n");
  EXPECT_EQ(MemoryWatch(root_.path()).sample()->available_bytes, kHostBytes);
}

TEST_F(SystemMemoryTest, PressureIsThatOfTheNearestCgroupThatTells) {
  const auto pressure = [](int us) {
    return "some avg10=1.50 avg60=0.20 avg300=0.00 total=" + std::to_string(us) + "\nfull avg10=0.00 total=7\n";
  };
  EXPECT_EQ(MemoryWatch(root_.path()).sample()->stalled_us, 0u);
  root_.write("proc/pressure/memory", pressure(1000));
  EXPECT_EQ(MemoryWatch(root_.path()).sample()->stalled_us, 1000u);
  EXPECT_FALSE(MemoryWatch(root_.path()).sample()->stalls_are_own);
  write_v2("/slice/app");
  root_.write("sys/fs/cgroup/slice/memory.pressure", pressure(200));
  const MemoryWatch watch(root_.path());
  EXPECT_EQ(watch.sample()->stalled_us, 200u);
  EXPECT_TRUE(watch.sample()->stalls_are_own);
  root_.write("sys/fs/cgroup/slice/memory.pressure", pressure(300));
  EXPECT_EQ(watch.sample()->stalled_us, 300u);
  root_.write("sys/fs/cgroup/slice/memory.pressure", "some total=\n");
  EXPECT_EQ(watch.sample()->stalled_us, 0u);
}

}  // namespace
}  // namespace sluice
