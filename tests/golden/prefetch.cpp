// prefetch MODEL
//
// Logits of a prompt and of 48 tokens after it, bit for bit as stock llama.cpp computes them, at 10, 25 and 50 % of the
// experts' bytes: with predictions that are only measured, with prefetching from the residual stream, from the blocks' inputs
// alone (as in a stock tool), far ahead and greedy, and with a drive that lets every prefetch fail. Reads come late
// and slots that are given up are overwritten. Exit 0: all equal; 1: something differs, or a case proved nothing.
#include <bit>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../unit/loader/step_device.h"
#include "base/log.h"
#include "delay_device.h"
#include "model_runner.h"

namespace {

using namespace sluice;

struct Case {
  std::string name;
  PrefetchMode mode = PrefetchMode::kOn;
  std::string plan;
  bool see_layers = true;
  bool prefetch_fails = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) golden::die("usage: prefetch MODEL");
  golden::quiet_llama();
  set_log_level(LogLevel::kWarning);
  const auto catalog = Catalog::open(argv[1], DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());

  golden::RunSpec spec{.ubatch = 128, .threads = 2, .decode = 48};
  golden::RunResult expected;
  {
    const golden::Model stock = golden::load_stock(argv[1]);
    const auto n_vocab = static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(stock.get())));
    std::mt19937 random(1);
    for (int i = 0; i < 300; ++i) spec.prompt.push_back(static_cast<llama_token>(random() % n_vocab));
    expected = golden::run(stock.get(), spec);
  }

  const std::vector<Case> cases = {
      {.name = "probe", .mode = PrefetchMode::kProbe},
      {.name = "on"},
      {.name = "block input", .see_layers = false},
      {.name = "far and greedy", .plan = "ahead=1/2@3,mult=2"},
      {.name = "failing", .prefetch_fails = true},
  };
  int failures = 0;
  for (const double percent : {10.0, 25.0, 50.0}) {
    for (const Case& the_case : cases) {
      EngineOptions options;
      options.budget = {BudgetSpec::Kind::kPercent, 0, percent};
      options.prefetch = the_case.mode;
      options.prefetch_plan = *parse_prefetch_plan(the_case.plan);
      options.poison_released_slots = true;
      options.verify_slots = true;
      options.wrap_device = [&](std::unique_ptr<Device> device) -> std::unique_ptr<Device> {
        device = std::make_unique<golden::DelayDevice>(std::move(device), 7, 1'000'000);
        return the_case.prefetch_fails ? std::make_unique<PrefetchFails>(std::move(device)) : std::move(device);
      };
      spec.see_layers = the_case.see_layers;
      const golden::Model streamed = golden::load_streamed(*catalog, options);
      const std::string differs = golden::difference(expected, golden::run(streamed.get(), spec));
      const EngineStats stats = engine_stats();
      const PrefetchCounters& prefetch = stats.prefetch;
      std::string fault = differs;
      if (the_case.mode == PrefetchMode::kProbe && (prefetch.submitted > 0 || stats.recall.empty())) fault += "; measured nothing, or read";
      if (the_case.mode == PrefetchMode::kOn && prefetch.submitted == 0) fault += "; nothing was prefetched";
      if (the_case.mode == PrefetchMode::kOn && prefetch.taken() == 0) fault += "; nothing was of use";
      if (the_case.prefetch_fails && (prefetch.failed == 0 || prefetch.ready_on_time > 0)) fault += "; no prefetch failed";
      failures += !fault.empty();
      std::printf("%-4.0f %% %-16s %s  hit rate %.3f, %llu prefetched: %llu in time, %llu on their way, %llu cancelled, %llu failed\n",
                  percent, the_case.name.c_str(), fault.empty() ? "equal" : fault.c_str(), stats.experts.hit_rate(),
                  static_cast<unsigned long long>(prefetch.submitted), static_cast<unsigned long long>(prefetch.ready_on_time),
                  static_cast<unsigned long long>(prefetch.not_ready), static_cast<unsigned long long>(prefetch.cancelled),
                  static_cast<unsigned long long>(prefetch.failed));
    }
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
