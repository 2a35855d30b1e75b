// equal_to_stock MODEL [--pack PACK] [--repack] [--lengths 1,2,8] [--ubatch 512,64] [--threads 1,2] [--budgets min,25%,100%]
//                [--decode N] [--verify] [--fused M]
//
// Logits of stock llama.cpp and of the streamed model, bit for bit, over all combinations of prompt length, micro-batch
// and threads, at each budget. With --pack the streamed model is that; with --repack both repack weights, which streamed
// experts have in a native pack alone. Exit 0: all equal; 1: something differs; 77: no MoE model.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <sstream>

#include "model_runner.h"

namespace {

using namespace sluice;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) golden::die("usage: equal_to_stock MODEL [--pack P] [--repack] [--lengths L] [--ubatch U] [--threads T] [--budgets B] [--decode N] [--verify] [--fused M]");
  const std::string path = argv[1];
  std::vector<std::string> lengths = {"1", "2", "8", "33"};
  std::vector<std::string> ubatches = {"512", "64"};
  std::vector<std::string> threads = {"1", "2"};
  std::vector<std::string> budgets = {"min", "100%"};
  int decode = 3;
  bool verify = false;
  bool repack = false;
  std::string streamed_path = path;
  FusedMode fused = FusedMode::kAuto;
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--verify" || flag == "--repack") {
      (flag == "--verify" ? verify : repack) = true;
      continue;
    }
    if (i + 1 >= argc) golden::die(flag + " wants a value");
    const std::string value = argv[++i];
    if (flag == "--pack") streamed_path = value;
    else if (flag == "--lengths") lengths = split(value);
    else if (flag == "--ubatch") ubatches = split(value);
    else if (flag == "--threads") threads = split(value);
    else if (flag == "--budgets") budgets = split(value);
    else if (flag == "--decode") decode = std::stoi(value);
    else if (flag == "--fused") fused = parse_fused_mode(value).value();
    else golden::die("unknown flag " + flag);
  }
  golden::quiet_llama();
  auto catalog = Catalog::open(streamed_path, DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());
  if (!catalog->is_moe()) {
    std::printf("%s: no routed experts\n", streamed_path.c_str());
    return 77;
  }

  std::vector<golden::RunSpec> specs;
  std::vector<golden::RunResult> expected;
  {
    const golden::Model stock = golden::load_stock(path, repack);
    const auto n_vocab = static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(stock.get())));
    for (const std::string& length : lengths) {
      for (const std::string& ubatch : ubatches) {
        // A prompt that fits one micro-batch of either size is the same computation.
        if (std::stoul(length) <= 64 && ubatch != ubatches.front()) continue;
        for (const std::string& thread : threads) {
          golden::RunSpec spec{.ubatch = static_cast<uint32_t>(std::stoul(ubatch)), .threads = std::stoi(thread), .decode = decode};
          std::mt19937 random(static_cast<unsigned>(std::stoul(length)));
          for (unsigned long i = 0; i < std::stoul(length); ++i) spec.prompt.push_back(static_cast<llama_token>(random() % n_vocab));
          specs.push_back(spec);
          expected.push_back(golden::run(stock.get(), spec));
        }
      }
    }
  }
  bool finite = false;
  bool decoded = true;
  for (const auto& result : expected) {
    decoded = decoded && result.decoded;
    for (const auto& logits : result.logits) {
      finite = finite || std::any_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v) && v != 0; });
    }
  }
  if (!decoded || !finite) golden::die("stock llama.cpp itself computes nothing with " + path);

  int failures = 0;
  for (const std::string& budget : budgets) {
    EngineOptions options;
    options.verify_slots = verify;
    options.fused = fused;
    if (budget == "min") {
      options.budget = {BudgetSpec::Kind::kBytes, engine_budget_bytes_min(*catalog), 0};
    } else {
      const auto parsed = parse_budget(budget);
      if (!parsed) golden::die(parsed.error().message());
      options.budget = *parsed;
    }
    const golden::Model streamed = golden::load_streamed(*catalog, options, repack);
    for (size_t i = 0; i < specs.size(); ++i) {
      const std::string differs = golden::difference(expected[i], golden::run(streamed.get(), specs[i]));
      if (differs.empty()) continue;
      ++failures;
      std::printf("DIFFERS  budget %s, prompt %zu, micro-batch %u, %d threads: %s\n", budget.c_str(), specs[i].prompt.size(),
                  specs[i].ubatch, specs[i].threads, differs.c_str());
    }
    const EngineStats stats = engine_stats();
    if (fused == FusedMode::kOff && (stats.fused_blocks != 0 || stats.generic_blocks + stats.lone_blocks == 0)) {
      ++failures;
      std::printf("DIFFERS  budget %s: %llu blocks were fused\n", budget.c_str(), static_cast<unsigned long long>(stats.fused_blocks));
    }
    if (!stats.streaming || stats.experts.requests == 0) {
      ++failures;
      std::printf("DIFFERS  budget %s: nothing was streamed\n", budget.c_str());
    }
    std::printf("%-10s %-5s slots %5llu  requests %8llu  hits %5.1f %%  evictions %7llu  unplaced %6llu\n", catalog->architecture.c_str(),
                budget.c_str(), static_cast<unsigned long long>(stats.slots), static_cast<unsigned long long>(stats.experts.requests),
                100 * stats.experts.hit_rate(), static_cast<unsigned long long>(stats.experts.evictions),
                static_cast<unsigned long long>(stats.experts.unplaced));
  }
  std::printf("%s: %zu runs at %zu budgets, %d differ\n", streamed_path.c_str(), specs.size(), budgets.size(), failures);
  return failures == 0 ? 0 : 1;
}
