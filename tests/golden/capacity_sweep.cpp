// capacity_sweep MODEL [--sizes N|all] [--prefill T] [--decode N] [--delay-ms D]
//
// Logits of a prompt and of the tokens generated after it, bit for bit as stock llama.cpp computes them, at pool sizes
// from the smallest that works to all experts: N sizes evenly apart, or one slot more each time. Reads take a random time
// more, and slots that are given up are overwritten at once, so that a reader of a slot that it does not hold shows.
// Exit 0: all equal; 1: something differs.
#include <bit>
#include <memory>
#include <random>

#include "base/log.h"
#include "delay_device.h"
#include "model_runner.h"

int main(int argc, char** argv) {
  using namespace sluice;
  if (argc < 2) golden::die("usage: capacity_sweep MODEL [--sizes N|all] [--prefill T] [--decode N] [--delay-ms D]");
  const std::string path = argv[1];
  std::string sizes = "6";
  golden::RunSpec spec{.ubatch = 512, .threads = 1, .decode = 64};
  unsigned prefill = 512;
  int64_t delay_ms = 5;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "--sizes") sizes = value;
    else if (flag == "--prefill") prefill = static_cast<unsigned>(std::stoul(value));
    else if (flag == "--decode") spec.decode = std::stoi(value);
    else if (flag == "--delay-ms") delay_ms = std::stol(value);
    else golden::die("unknown flag " + flag);
  }
  golden::quiet_llama();
  set_log_level(LogLevel::kWarning);
  auto catalog = Catalog::open(path, DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());

  golden::RunResult expected;
  {
    const golden::Model stock = golden::load_stock(path);
    const auto n_vocab = static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(stock.get())));
    std::mt19937 random(prefill);
    for (unsigned i = 0; i < prefill; ++i) spec.prompt.push_back(static_cast<llama_token>(random() % n_vocab));
    expected = golden::run(stock.get(), spec);
    if (!expected.decoded) golden::die("stock llama.cpp itself computes nothing with " + path);
  }

  EngineOptions options;
  options.poison_released_slots = true;
  uint64_t seed = 1;
  options.wrap_device = [&](std::unique_ptr<Device> device) -> std::unique_ptr<Device> {
    return std::make_unique<golden::DelayDevice>(std::move(device), seed, delay_ms * 1'000'000);
  };
  const auto differs_at = [&](const BudgetSpec& budget, EngineStats& stats) {
    options.budget = budget;
    const golden::Model streamed = golden::load_streamed(*catalog, options);
    const std::string differs = golden::difference(expected, golden::run(streamed.get(), spec));
    stats = engine_stats();
    return differs;
  };
  const uint64_t budget_min = engine_budget_bytes_min(*catalog);
  uint64_t n_expert = 0;
  for (const ExpertLayer& layer : catalog->expert_layers) n_expert += layer.n_expert;
  const uint64_t step_bytes =
      sizes == "all" ? catalog->expert_bytes / n_expert
                     : (catalog->expert_bytes - std::min(catalog->expert_bytes, budget_min)) / (std::stoul(sizes) - 1);

  int failures = 0;
  unsigned n_size = 0;
  uint64_t slots_before = 0;
  EngineStats smallest;
  for (uint64_t budget = budget_min; slots_before < n_expert; budget += step_bytes, ++seed) {
    const bool last = sizes != "all" && budget >= catalog->expert_bytes;
    EngineStats stats;
    const std::string differs = differs_at(last ? BudgetSpec{.kind = BudgetSpec::Kind::kPercent, .percent = 100}
                                                : BudgetSpec{.kind = BudgetSpec::Kind::kBytes, .bytes = budget},
                                           stats);
    if (n_size++ == 0) smallest = stats;
    slots_before = stats.slots;
    if (differs.empty()) continue;
    ++failures;
    std::printf("DIFFERS  %llu slots: %s\n", static_cast<unsigned long long>(stats.slots), differs.c_str());
  }
  // Without these it proves nothing.
  if (smallest.experts.evictions == 0) golden::die("the smallest pool evicts nothing");
  if (smallest.io_path.find("delay(") == std::string::npos) golden::die("reads are not delayed");
  std::printf("%-12s %u sizes from %llu to %llu slots, %llu evictions and %llu unplaced at the smallest: %d differ\n",
              catalog->architecture.c_str(), n_size, static_cast<unsigned long long>(smallest.slots),
              static_cast<unsigned long long>(slots_before), static_cast<unsigned long long>(smallest.experts.evictions),
              static_cast<unsigned long long>(smallest.experts.unplaced), failures);
  return failures == 0 ? 0 : 1;
}
