#include "cli/output_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace sluice {
namespace {

Status write_file(const std::string& path, std::string_view text) {
  Result<OutputFile> file = OutputFile::create(path);
  if (!file) return file.error();
  return file->write_and_commit(text);
}

class OutputFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("sluice_output_file_test_{}", getpid());
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const char* name) const { return folder_ / name; }
  static std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  auto files() const { return std::distance(std::filesystem::directory_iterator(folder_), {}); }

  std::filesystem::path folder_;
};

TEST_F(OutputFileTest, ReplacesTheWholeFile) {
  std::ofstream(path("out")) << "something longer that was there before";
  ASSERT_TRUE(write_file(path("out"), "new"));
  EXPECT_EQ(contents(path("out")), "new");
  EXPECT_EQ(files(), 1) << "no temporary file stays";
}

TEST_F(OutputFileTest, WithoutCommitTheOldFileStands) {
  std::ofstream(path("out")) << "old";
  {
    Result<OutputFile> file = OutputFile::create(path("out"));
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->write("half of", 7));
    EXPECT_EQ(contents(path("out")), "old");
  }
  EXPECT_EQ(contents(path("out")), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, AMissingFolderIsTold) {
  const Status status = write_file(path("missing/out"), "text");
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message().find("missing/out"), std::string::npos) << status.error().message();
  EXPECT_NE(status.error().system_error, 0);
}

TEST_F(OutputFileTest, AFullDeviceIsTold) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  EXPECT_FALSE(write_file("/dev/full", "text"));
}

TEST_F(OutputFileTest, DevicesAreWrittenNotReplaced) {
  ASSERT_TRUE(write_file("/dev/null", "text"));
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

}  // namespace
}  // namespace sluice
