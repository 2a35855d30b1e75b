// make_model: writes a synthetic MoE model as GGUF, from a seed. See tools/README.md.
#include <fmt/format.h>
#include <ggml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "common/progress_line.h"
#include "common/tensor_type.h"
#include "make_model/plan.h"
#include "make_model/spec.h"
#include "make_model/weights.h"
#include "make_model/writer.h"

namespace sluice::make_model {
namespace {

// The command line as it was given; ModelSpec is what it means.
struct Options {
  std::string arch = "qwen3moe";
  std::string type = "q4_0";
  std::string down_type;
  std::string dense_type = "q8_0";
  std::vector<std::string> mixed;
  std::optional<uint32_t> n_expert_shared;
  std::optional<uint32_t> n_head_kv;
  bool expert_biases = false;
  std::string tokenizer = "models/tiny-qwen3next-128x8-q4_0.gguf";
  std::string out;
  uint32_t part_count = 1;
  uint32_t thread_count = 2;
  ModelSpec spec;
};

void declare(CLI::App& app, Options& options) {
  ModelSpec& spec = options.spec;
  app.add_option("--arch", options.arch, "qwen3moe, qwen3next, deepseek2, gpt-oss or llama")->capture_default_str();
  app.add_option("--layers", spec.n_layer, "Number of layers")->capture_default_str();
  app.add_option("--dense-layers", spec.n_layer_dense, "First layers with a dense FFN (deepseek2)")
      ->capture_default_str();
  app.add_option("--width", spec.width, "Elements of the residual stream")->capture_default_str();
  app.add_option("--ff", spec.ff, "Inner width of one expert")->capture_default_str();
  app.add_option("--experts", spec.n_expert, "Experts of a layer")->capture_default_str();
  app.add_option("--experts-used", spec.n_expert_used, "Experts of a layer that a token uses")->capture_default_str();
  app.add_option("--shared-experts", options.n_expert_shared,
                 "Experts that every token uses (qwen3next, deepseek2; default there: 1)");
  app.add_option("--groups", spec.n_group, "Expert groups (deepseek2)")->capture_default_str();
  app.add_option("--groups-used", spec.n_group_used, "Groups that a token may choose from (deepseek2)")
      ->capture_default_str();
  app.add_option("--heads", spec.n_head, "Attention heads")->capture_default_str();
  app.add_option("--kv-heads", options.n_head_kv, "Heads of keys and values (default: half of --heads)");
  app.add_option("--head-dim", spec.head_dim, "Elements of one head")->capture_default_str();
  app.add_option("--context", spec.context, "Context length that the model claims")->capture_default_str();
  app.add_option("--type", options.type, "ggml type of the experts")->capture_default_str();
  app.add_option("--mixed", options.mixed, "Types of the experts, one layer each, repeated: q4_K,q6_K")->delimiter(',');
  app.add_option("--down-type", options.down_type, "Type of the experts' down matrices, if another");
  app.add_option("--dense-type", options.dense_type,
                 "Type of all other matrices (q8_0 or f16 where its blocks do not fit the rows)")
      ->capture_default_str();
  app.add_flag("--fused-gate-up", spec.gate_up_fused, "One tensor for gate and up (qwen3next, deepseek2)");
  app.add_flag("--biases", options.expert_biases, "Expert biases (gpt-oss, which always has them)");
  app.add_flag("--scales", spec.expert_scales, "A factor per expert for each expert tensor but the fused one");
  app.add_option("--router-skew", spec.router_skew, "Unevenness of the experts' popularity; 0 = all alike")
      ->capture_default_str();
  app.add_option("--seed", spec.seed, "Same seed, same bytes")->capture_default_str();
  app.add_option("--split", options.part_count, "Number of files")->check(CLI::Range(1, 9999))->capture_default_str();
  app.add_option("--tokenizer", options.tokenizer, "GGUF model whose tokenizer is taken over")->capture_default_str();
  app.add_option("--threads", options.thread_count, "Threads that make weights")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--out", options.out, "File to write (with --split: PREFIX.gguf of PREFIX-00001-of-00003.gguf)")
      ->required();
}

Result<ModelSpec> resolve(const Options& options) {
  ModelSpec spec = options.spec;
  Result<Arch> arch = parse_arch(options.arch);
  if (!arch) return arch.error();
  spec.arch = *arch;
  if (options.expert_biases && spec.arch != Arch::kGptOss) {
    return make_error(ErrorCode::kBadArgument, "--biases: llama.cpp knows no expert biases in {}",
                      arch_name(spec.arch));
  }
  const bool has_shared = spec.arch == Arch::kQwen3Next || spec.arch == Arch::kDeepseek2;
  spec.n_expert_shared = options.n_expert_shared.value_or(has_shared ? 1 : 0);
  spec.n_head_kv = options.n_head_kv.value_or(std::max(1U, spec.n_head % 2 == 0 ? spec.n_head / 2 : spec.n_head));

  for (const std::string& name : options.mixed.empty() ? std::vector{options.type} : options.mixed) {
    Result<ggml_type> type = tools::parse_type(name);
    if (!type) return type.error();
    spec.expert_types.push_back(*type);
  }
  if (!options.down_type.empty()) {
    Result<ggml_type> type = tools::parse_type(options.down_type);
    if (!type) return type.error();
    spec.down_type = *type;
  }
  Result<ggml_type> dense_type = tools::parse_type(options.dense_type);
  if (!dense_type) return dense_type.error();
  spec.dense_type = *dense_type;
  if (Status checked = check_spec(spec); !checked.ok()) return checked.error();
  return spec;
}

Status run(const Options& options) {
  const Result<ModelSpec> spec = resolve(options);
  if (!spec) return spec.error();
  const Result<Tokenizer> tokenizer = read_tokenizer(options.tokenizer);
  if (!tokenizer) return tokenizer.error();
  const ModelPlan plan = plan_model(*spec, *tokenizer);
  WeightMaker weights(spec->seed, options.thread_count);
  tools::ProgressLine line("make_model", plan.tensor_bytes());
  return write_model(plan, weights, options.out, options.part_count,
                     [&](uint64_t bytes_written) { line.update(bytes_written); });
}

}  // namespace
}  // namespace sluice::make_model

int main(int argc, char** argv) {
  CLI::App app{"Writes a synthetic Mixture-of-Experts model as GGUF, from a seed."};
  sluice::make_model::Options options;
  declare(app, options);
  CLI11_PARSE(app, argc, argv);
  const sluice::Status status = run(options);
  if (!status.ok()) {
    fmt::print(stderr, "make_model: {}\n", status.error().message());
    return 1;
  }
  return 0;
}
