// fused_and_generic MODEL
//
// 512 tokens, half of them a prompt and half generated, computed by the fused executor and by ggml's separate
// operations, at a budget of a quarter: all logits are equal bit for bit, and each run went the way it was told to.
#include <bit>

#include "model_runner.h"

namespace {

using namespace sluice;

constexpr size_t kPrompt = 256;
constexpr int kDecode = 256;

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) golden::die("usage: fused_and_generic MODEL");
  golden::quiet_llama();
  const auto catalog = Catalog::open(argv[1], DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());
  golden::RunSpec spec{.ubatch = 64, .threads = 2, .decode = kDecode};
  for (size_t i = 0; i < kPrompt; ++i) spec.prompt.push_back(static_cast<llama_token>(i * 7919 % 1000 + 5));

  std::vector<golden::RunResult> results;
  for (const FusedMode mode : {FusedMode::kRequire, FusedMode::kOff}) {
    EngineOptions options;
    options.budget = {BudgetSpec::Kind::kPercent, 0, 25};
    options.fused = mode;
    const golden::Model model = golden::load_streamed(*catalog, options);
    results.push_back(golden::run(model.get(), spec));
    const EngineStats stats = engine_stats();
    std::printf("fused %llu, generic %llu, lone %llu blocks; computed %.2f s, scattered %.3f s\n",
                static_cast<unsigned long long>(stats.fused_blocks),
                static_cast<unsigned long long>(stats.generic_blocks),
                static_cast<unsigned long long>(stats.lone_blocks), stats.compute_s, stats.scatter_s);
    const bool fused = mode == FusedMode::kRequire;
    if (stats.lone_blocks != 0 || (stats.fused_blocks > 0) != fused || (stats.generic_blocks > 0) == fused) {
      golden::die("blocks went another way than they were told to");
    }
  }
  if (!results[0].decoded || results[0].logits.size() != kDecode + 1) golden::die("the model does not decode");
  const std::string differs = golden::difference(results[0], results[1]);
  std::printf("%s\n", differs.empty() ? "equal" : differs.c_str());
  return differs.empty() ? 0 : 1;
}
