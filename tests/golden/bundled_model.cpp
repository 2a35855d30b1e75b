// bundled_model MODEL REFERENCE_JSON
//
// The trained model at 10, 25, 50 and 100 % of its experts' bytes: greedy 64 tokens for five prompts give stock
// llama.cpp's tokens and logits bit for bit, with evictions below 100 %. Then both continuations are compared with
// those of an independent implementation (transformers, float32, weights before quantisation), which a quantised model
// matches only so far: ours must match exactly as far as stock's does.
#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model_runner.h"

namespace {

using namespace sluice;

constexpr int kDecode = 64;

size_t common_prefix(const std::vector<llama_token>& a, const std::vector<llama_token>& b) {
  size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return n;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) golden::die("usage: bundled_model MODEL REFERENCE_JSON");
  golden::quiet_llama();
  const auto catalog = Catalog::open(argv[1], DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());
  nlohmann::json reference;
  std::ifstream(argv[2]) >> reference;

  std::vector<golden::RunSpec> specs;
  std::vector<std::vector<llama_token>> independent;
  for (const auto& prompt : reference["prompts"]) {
    specs.push_back({.prompt = prompt["ids"].get<std::vector<llama_token>>(), .threads = 2, .decode = kDecode});
    independent.push_back(prompt["greedy_ids"].get<std::vector<llama_token>>());
  }
  if (specs.size() != 5) golden::die("five prompts were expected");
  std::vector<golden::RunResult> expected;
  {
    const golden::Model stock = golden::load_stock(argv[1]);
    for (const auto& spec : specs) expected.push_back(golden::run(stock.get(), spec));
  }
  int failures = 0;
  const auto check = [&](bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED  %s\n", what.c_str());
  };
  for (const double percent : {10.0, 25.0, 50.0, 100.0}) {
    EngineOptions options;
    options.budget = {BudgetSpec::Kind::kPercent, 0, percent};
    options.verify_slots = true;
    const golden::Model streamed = golden::load_streamed(*catalog, options);
    for (size_t i = 0; i < specs.size(); ++i) {
      const auto given = golden::run(streamed.get(), specs[i]);
      const std::string differs = golden::difference(expected[i], given);
      check(differs.empty(), "prompt " + std::to_string(i) + " at " + std::to_string(percent) + " %: " + differs);
      if (percent == 10.0) {
        std::printf("prompt %zu: stock and streamed agree with the independent reference for %zu and %zu of %zu tokens\n", i,
                    common_prefix(expected[i].tokens, independent[i]), common_prefix(given.tokens, independent[i]), independent[i].size());
      }
    }
    const EngineStats stats = engine_stats();
    check(stats.streaming, "not streaming");
    check((stats.experts.evictions > 0) == (percent < 100), "evictions " + std::to_string(stats.experts.evictions));
    check(stats.pool_bytes <= stats.budget_bytes, "the pool is larger than the budget");
    std::printf("budget %3.0f %%: %llu slots, hit rate %.3f, %llu evictions\n", percent, static_cast<unsigned long long>(stats.slots),
                stats.experts.hit_rate(), static_cast<unsigned long long>(stats.experts.evictions));
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
