// Mirrors under a loader: alignment that suits all copies, exact bytes, reads on both drives.
#include "loader/drives.h"

#include <array>
#include <cstring>
#include <numeric>

#include "loader_fixture.h"

namespace sluice {
namespace {

struct CopyFolder {
  explicit CopyFolder(const TestModel& model) : path(model.path + ".mirror") {
    std::filesystem::create_directory(path);
    file = path + "/" + std::filesystem::path(model.path).filename().string();
    std::filesystem::copy_file(model.path, file);
  }
  ~CopyFolder() { std::filesystem::remove_all(path); }
  std::string path;
  std::string file;
};

// The model's own file is read through the page cache and asks for nothing, the copy is read directly: every read must
// suit the copy. The end of the file is no multiple of the alignment.
TEST(Drives, TheGreatestAlignmentHoldsAndBytesAreExact) {
  for (const uint64_t slab_bytes : {uint64_t{3000}, uint64_t{200000}}) {
    const auto model = make_test_model({slab_bytes, slab_bytes}, 24, DirectMode::kOff);
    const CopyFolder copy(*model);
    const uint64_t copy_align = File::open(copy.file, DirectMode::kAuto).value()->align_bytes();
    auto device = open_drives({.direct = DirectMode::kAuto, .mirrors = {copy.path}}, model->sources, {});
    ASSERT_TRUE(device.ok()) << device.error().message();
    for (const LayerSource& source : model->sources) {
      for (const SpanSource& span : source.spans) EXPECT_EQ(span.file->align_bytes(), copy_align);
    }
    const SlotPlan plan = plan_layout(model->sources, 2);
    auto loader = Loader::create(model->sources, std::move(*device), {.budget_bytes = plan.bytes_min * 2, .top_k = 2});
    ASSERT_TRUE(loader.ok()) << loader.error().message();
    std::vector<uint32_t> experts(24);
    std::iota(experts.begin(), experts.end(), 0u);
    for (int round = 0; round < 4; ++round) {
      for (size_t s = 0; s < model->sources.size(); ++s) {
        const LayerSource& source = model->sources[s];
        ASSERT_TRUE((*loader)->start(source.layer, experts).ok());
        size_t seen = 0;
        while (true) {
          const auto ready = (*loader)->next();
          ASSERT_TRUE(ready.ok()) << ready.error().message();
          if (ready->empty()) break;
          for (const ReadyExpert& expert : *ready) {
            ++seen;
            for (size_t m = 0; m < source.matrices.size(); ++m) {
              const auto expected = model->slab(s, m, experts[expert.index]);
              const std::byte* given = expert.slab[static_cast<size_t>(source.matrices[m].role)];
              ASSERT_EQ(std::memcmp(given, expected.data(), expected.size()), 0) << "expert " << expert.index;
            }
          }
        }
        (*loader)->end();
        EXPECT_EQ(seen, 24u);
      }
    }
    EngineStats stats;
    (*loader)->add_stats(stats);
    ASSERT_EQ(stats.io_drives.size(), 2u);
    EXPECT_EQ(stats.io_drives[0].path, std::filesystem::path(model->path).parent_path().string());
    EXPECT_EQ(stats.io_drives[1].path, copy.path);
    EXPECT_GT(stats.io_drives[0].reads, 0u);
    EXPECT_GT(stats.io_drives[1].reads, 0u);
    EXPECT_EQ(stats.io_drives[0].reads + stats.io_drives[1].reads, stats.io_reads);
    EXPECT_EQ(stats.io_errors, 0u);
  }
}

TEST(Drives, ABadCopyIsRefused) {
  const auto model = make_test_model({5000}, 8, DirectMode::kOff);
  const CopyFolder copy(*model);
  std::filesystem::resize_file(copy.file, 1234);
  const auto device = open_drives({.mirrors = {copy.path}}, model->sources, {});
  ASSERT_FALSE(device.ok());
  EXPECT_NE(device.error().text.find("1234 bytes"), std::string::npos) << device.error().text;
}

// Parts without experts count too: a folder with half a model is a mistake.
TEST(Drives, OtherFilesMustBeThereToo) {
  const auto model = make_test_model({5000}, 8, DirectMode::kOff);
  const auto other = make_test_model({5000}, 8, DirectMode::kOff);
  const CopyFolder copy(*model);
  const std::array others = {other->sources.front().spans.front().file};
  const auto device = open_drives({.mirrors = {copy.path}}, model->sources, others);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.error().code, ErrorCode::kNotFound);
}

TEST(Drives, TooManyFoldersAreRefused) {
  const auto model = make_test_model({5000}, 8, DirectMode::kOff);
  const auto device = open_drives({.mirrors = std::vector<std::string>(16, "x")}, model->sources, {});
  ASSERT_FALSE(device.ok());
  EXPECT_NE(device.error().text.find("at most 15 folders, given 16"), std::string::npos) << device.error().text;
}

}  // namespace
}  // namespace sluice
