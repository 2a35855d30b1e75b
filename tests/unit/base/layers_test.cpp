// Includes point one way: a module may use only the modules that stand before it (docs/design.md).
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>

namespace {

const std::map<std::string, std::set<std::string>> kMayUse = {
    {"base", {}},
    {"trace", {"base"}},
    {"io", {"base", "trace"}},
    {"store", {"base", "trace", "io"}},
    {"policy", {"base", "trace"}},
    {"pool", {"base", "trace", "policy"}},
    {"predict", {"base", "trace", "store"}},
    {"loader", {"base", "trace", "io", "store", "policy", "pool", "predict"}},
    {"moe", {"base", "trace", "io", "store", "policy", "pool", "predict", "loader"}},
    {"backend", {"base", "trace", "io", "store", "policy", "pool", "predict", "loader", "moe"}},
    {"cli", {"base", "trace", "io", "store", "policy", "pool", "predict", "loader", "moe", "backend"}},
};

TEST(Layers, IncludesPointOneWay) {
  const std::filesystem::path source = SLUICE_SOURCE_DIR "/src";
  const std::regex include(R"re(^\s*#include\s+"([a-z]+)/[^"]+")re");
  int includes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(source)) {
    if (!entry.is_regular_file()) continue;
    const std::string module = entry.path().lexically_relative(source).begin()->string();
    ASSERT_TRUE(kMayUse.contains(module)) << entry.path();
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      std::smatch match;
      if (!std::regex_search(line, match, include)) continue;
      const std::string used = match[1];
      ++includes;
      EXPECT_TRUE(used == module || kMayUse.at(module).contains(used)) << entry.path() << ": " << line;
    }
  }
  EXPECT_GT(includes, 50) << "the test did not see the sources";
}

}  // namespace
