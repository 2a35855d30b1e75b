#include "cli/replay_command.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "trace/routing_trace.h"

namespace sluice {
namespace {

class ReplayCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path = (std::filesystem::temp_directory_path() / fmt::format("sluice_{}_{}", test->name(), getpid())).string();
  }
  void TearDown() override { std::filesystem::remove(path); }

  // Four tokens in our own format: layer 1 of 2, two of four experts each, of 1000 bytes.
  void write_trace() {
    auto writer = RoutingTraceWriter::create(
        path, {.n_layer = 2, .n_expert = 4, .top_k = 2, .model = "m", .record_bytes = {0, 1000}});
    ASSERT_TRUE(writer.ok());
    for (const std::vector<int32_t>& ids : {std::vector<int32_t>{0, 1}, {1, 2}, {2, 3}, {0, 1}})
      (*writer)->append(1, ids);
    ASSERT_TRUE((*writer)->close().ok());
  }

  int run(std::vector<std::string> flags) {
    CLI::App app("", "sluice");
    int exit_code = -1;
    add_replay_command(app, exit_code);
    std::vector<const char*> arguments = {"sluice", "replay", path.c_str()};
    for (const std::string& flag : flags) arguments.push_back(flag.c_str());
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    try {
      app.parse(static_cast<int>(arguments.size()), arguments.data());
    } catch (const CLI::ParseError& fault) {
      parse_fault = fault.what();
    }
    out = testing::internal::GetCapturedStdout();
    error = testing::internal::GetCapturedStderr();
    return exit_code;
  }

  std::string path;
  std::string out;
  std::string error;
  std::string parse_fault;
};

TEST_F(ReplayCommandTest, ReplaysOurOwnFormat) {
  write_trace();
  ASSERT_EQ(run({"--slots", "2,3", "--policy", "lru,lfu", "--json"}), 0) << error << parse_fault;
  const nlohmann::json json = nlohmann::json::parse(out);
  EXPECT_EQ(json["trace"]["model"], "m");
  ASSERT_EQ(json["runs"].size(), 6U);
  EXPECT_EQ(json["runs"][0]["policy"], "lru");
  EXPECT_EQ(json["runs"][0]["hits"], 2);
  EXPECT_EQ(json["runs"][0]["bytes_read"], 6000);
  EXPECT_EQ(json["runs"][3]["slots"], 3);

  ASSERT_EQ(run({"--budget", "50%,3000", "--layers", "--warm", "1", "--read-gbps", "2", "--read-latency-us", "90",
                 "--compute-ms", "1.5"}),
            0)
      << error << parse_fault;
  EXPECT_NE(out.find("hit rate by layer"), std::string::npos);
  EXPECT_NE(
      out.find("tokens/s = 1 / (1.5 ms compute + read per token / 2 GB/s + layer calls with a miss per token x 90 us)"),
      std::string::npos)
      << out;
  EXPECT_NE(out.find("s3fifo"), std::string::npos);
  EXPECT_NE(out.find("75.0 %"), std::string::npos);
}

TEST_F(ReplayCommandTest, ReplaysBareBytes) {
  std::ofstream(path, std::ios::binary) << std::string("\0\1\2\3\0\2\1\3", 8);
  ASSERT_EQ(run({"--raw", "2,2,4", "--budget", "50%", "--per-layer", "--json", "--record-bytes", "1KiB"}), 0)
      << error << parse_fault;
  const nlohmann::json json = nlohmann::json::parse(out);
  EXPECT_EQ(json["pools"], "per layer");
  EXPECT_EQ(json["trace"]["tokens"], 2);
  EXPECT_EQ(json["trace"]["expert_bytes"], 8 * 1024);
}

TEST_F(ReplayCommandTest, SalvagesACutTrace) {
  write_trace();
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 30);
  EXPECT_EQ(run({"--slots", "2"}), 1);
  EXPECT_TRUE(error.starts_with("sluice replay: " + path + ": routing trace: ")) << error;
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1);
  EXPECT_EQ(out, "");
  EXPECT_EQ(run({"--slots", "2", "--salvage"}), 0);
  EXPECT_NE(out.find("3 tokens in 3 forwards"), std::string::npos) << out;
}

TEST_F(ReplayCommandTest, TellsUsageFromFailure) {
  EXPECT_EQ(run({}), 1);
  EXPECT_NE(error.find("No such file"), std::string::npos) << error;
  write_trace();
  EXPECT_EQ(run({"--slots", "5"}), 2);
  EXPECT_EQ(error, "sluice replay: slots: wanted 1 to 4 (all experts of the trace), given 5\n");
  EXPECT_EQ(run({"--policy", "mru"}), -1);
  EXPECT_NE(parse_fault.find("policy: wanted lru, lfu, lfru or s3fifo, given 'mru'"), std::string::npos) << parse_fault;
  EXPECT_EQ(run({"--raw", "2,2"}), -1);
  EXPECT_EQ(run({"--read-gbps", "0"}), -1);
  EXPECT_EQ(run({"--half-life", "0"}), -1);
}

}  // namespace
}  // namespace sluice
