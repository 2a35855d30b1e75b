// scaled_model MODEL SCALED REFERENCE_JSON LOGIT_DIFFERENCE_MAX CHOICES_PERCENT_MAX
//
// A model and what scale_model made of it: for five prompts and 64 greedy tokens the same tokens, logits that differ by
// at most LOGIT_DIFFERENCE_MAX, and the same experts for every layer and token, but for that share of the choices. The
// scaled one is streamed with a quarter of its experts in memory. With 0 and 0 both must be equal bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model_runner.h"
#include "trace/routing_trace.h"

namespace {

using namespace sluice;

constexpr int kDecode = 64;

struct Streamed {
  std::vector<golden::RunResult> results;
  RoutingTrace trace;
  EngineStats stats;
};

Streamed run_streamed(const std::string& path, double percent, const std::vector<golden::RunSpec>& specs) {
  const auto catalog = Catalog::open(path, DirectMode::kAuto);
  if (!catalog) golden::die(catalog.error().message());
  const std::string trace_path = path + ".trace";
  EngineOptions options;
  options.budget = {BudgetSpec::Kind::kPercent, 0, percent};
  options.trace_path = trace_path;
  Streamed streamed;
  {
    const golden::Model model = golden::load_streamed(*catalog, options);
    for (const auto& spec : specs) streamed.results.push_back(golden::run(model.get(), spec));
    streamed.stats = engine_stats();
  }  // the trace is complete once the model is gone
  auto trace = read_routing_trace(trace_path);
  if (!trace) golden::die(trace.error().message());
  std::filesystem::remove(trace_path);
  streamed.trace = std::move(*trace);
  return streamed;
}

float largest_difference(const golden::RunResult& a, const golden::RunResult& b) {
  float largest = 0;
  for (size_t step = 0; step < std::min(a.logits.size(), b.logits.size()); ++step) {
    for (size_t i = 0; i < a.logits[step].size(); ++i) {
      const float difference = std::fabs(a.logits[step][i] - b.logits[step][i]);
      if (!(difference <= largest)) largest = difference;  // a NaN counts too
    }
  }
  return largest;
}

// How many (layer, token) choices are of other experts, or weigh the same ones in another order.
struct ChoicesDiffering {
  size_t in_set = 0;
  size_t in_order = 0;
};

ChoicesDiffering differing_choices(const RoutingTrace& a, const RoutingTrace& b) {
  ChoicesDiffering differing;
  const size_t top_k = a.header.top_k;
  for (size_t at = 0; at < a.ids.size(); at += top_k) {
    std::vector<uint16_t> one(a.ids.begin() + at, a.ids.begin() + at + top_k);
    std::vector<uint16_t> other(b.ids.begin() + at, b.ids.begin() + at + top_k);
    if (one == other) continue;
    std::ranges::sort(one);
    std::ranges::sort(other);
    ++(one == other ? differing.in_order : differing.in_set);
  }
  return differing;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    golden::die("usage: scaled_model MODEL SCALED REFERENCE_JSON LOGIT_DIFFERENCE_MAX CHOICES_PERCENT_MAX");
  }
  const float difference_max = std::strtof(argv[4], nullptr);
  const double choices_percent_max = std::strtod(argv[5], nullptr);
  golden::quiet_llama();
  nlohmann::json reference;
  std::ifstream(argv[3]) >> reference;
  std::vector<golden::RunSpec> specs;
  for (const auto& prompt : reference["prompts"]) {
    specs.push_back({.prompt = prompt["ids"].get<std::vector<llama_token>>(), .threads = 2, .decode = kDecode});
  }
  if (specs.size() != 5) golden::die("five prompts were expected");

  const Streamed small = run_streamed(argv[1], 100, specs);
  const Streamed large = run_streamed(argv[2], 25, specs);
  int failures = 0;
  const auto check = [&](bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED  %s\n", what.c_str());
  };
  float largest = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    const float difference = largest_difference(small.results[i], large.results[i]);
    largest = std::max(largest, difference);
    check(small.results[i].decoded && large.results[i].decoded, "prompt " + std::to_string(i) + " does not decode");
    check(small.results[i].tokens == large.results[i].tokens, "prompt " + std::to_string(i) + ": other tokens");
    check(difference <= difference_max,
          "prompt " + std::to_string(i) + ": logits differ by " + std::to_string(difference));
  }
  const size_t choices = small.trace.ids.size() / small.trace.header.top_k;
  check(choices > 0 && small.trace.ids.size() == large.trace.ids.size(), "the routing is not of the same tokens");
  const ChoicesDiffering differ = small.trace.ids.size() == large.trace.ids.size()
                                      ? differing_choices(small.trace, large.trace)
                                      : ChoicesDiffering{};
  const double differ_percent =
      100.0 * static_cast<double>(differ.in_set + differ.in_order) / static_cast<double>(choices);
  check(differ_percent <= choices_percent_max, std::to_string(differ_percent) + " % of the choices of experts differ");
  check(large.stats.experts.evictions > 0, "nothing was evicted");
  check(large.stats.expert_bytes > small.stats.expert_bytes, "the experts did not grow");
  std::printf(
      "largest difference of a logit %g; of %zu choices %zu of other experts, %zu in another order; %d failures\n",
      static_cast<double>(largest), choices, differ.in_set, differ.in_order, failures);
  return failures == 0 ? 0 : 1;
}
