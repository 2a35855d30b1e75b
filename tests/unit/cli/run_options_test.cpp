#include "cli/run_options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace sluice {
namespace {

RunOptions parsed(const std::string& arguments) {
  CLI::App app;
  RunOptions options;
  add_run_options(app, options);
  app.parse(arguments);
  return options;
}

TEST(RunOptions, DefaultsAreTheDocumentedOnes) {
  const RunOptions options = parsed("-m model.gguf");
  EXPECT_EQ(options.model_path, "model.gguf");
  EXPECT_EQ(options.tokens_max, 256);
  EXPECT_EQ(options.context_tokens, 0u);
  EXPECT_EQ(options.batch_tokens, 2048u);
  EXPECT_EQ(options.ubatch_tokens, 0u) << "automatic";
  EXPECT_FALSE(options.repack);
  EXPECT_FALSE(options.prompt);
  EXPECT_FALSE(options.budget);
  EXPECT_EQ(options.log_level, LogLevel::kWarning);
}

TEST(RunOptions, MirrorsAddUpAndWinOverTheEnvironment) {
  const RunOptions options = parsed("-m m.gguf --mirror a --mirror b");
  EXPECT_EQ(options.mirrors, (std::vector<std::string>{"a", "b"}));
  EngineOptions environment;
  environment.mirrors = {"c"};
  EXPECT_EQ(engine_options_with_flags(environment, options).mirrors, options.mirrors);
  EXPECT_EQ(engine_options_with_flags(environment, parsed("-m m.gguf")).mirrors, environment.mirrors);
}

TEST(RunOptions, ReadsEveryFlag) {
  const RunOptions options = parsed(
      "-m m.gguf -p Hi -n -1 -c 1024 -t 3 --threads-batch 4 -b 256 --ubatch 64 --repack --system Sys --temp 0 --top-k "
      "5 "
      "--top-p 0.5 --min-p 0.1 --seed 7 --budget 25% --io pread --direct off --policy lfu --fit off --verify-slots "
      "--stats "
      "s.json "
      "--logits l.bin --tokens t.json --log-level info");
  EXPECT_EQ(options.prompt, "Hi");
  EXPECT_EQ(options.tokens_max, -1);
  EXPECT_EQ(options.context_tokens, 1024u);
  EXPECT_EQ(options.threads, 3);
  EXPECT_EQ(options.threads_batch, 4);
  EXPECT_EQ(options.batch_tokens, 256u);
  EXPECT_EQ(options.ubatch_tokens, 64u);
  EXPECT_TRUE(options.repack);
  EXPECT_EQ(options.system, "Sys");
  EXPECT_EQ(options.temperature, 0.0f);
  EXPECT_EQ(options.top_k, 5);
  EXPECT_EQ(options.top_p, 0.5f);
  EXPECT_EQ(options.min_p, 0.1f);
  EXPECT_EQ(options.seed, 7u);
  ASSERT_TRUE(options.budget);
  EXPECT_EQ(options.budget->kind, BudgetSpec::Kind::kPercent);
  EXPECT_EQ(options.budget->percent, 25.0);
  EXPECT_EQ(options.io, IoPath::kPread);
  EXPECT_EQ(options.direct, DirectMode::kOff);
  EXPECT_EQ(options.policy, PolicyKind::kLfu);
  EXPECT_EQ(options.fit, false);
  EXPECT_TRUE(options.verify_slots);
  EXPECT_EQ(options.stats_path, "s.json");
  EXPECT_EQ(options.logits_path, "l.bin");
  EXPECT_EQ(options.tokens_path, "t.json");
  EXPECT_EQ(options.log_level, LogLevel::kInfo);
}

TEST(RunOptions, AnEmptyPromptIsAPrompt) {
  CLI::App app;
  RunOptions options;
  add_run_options(app, options);
  const char* arguments[] = {"run", "-m", "m.gguf", "-p", ""};
  app.parse(5, arguments);
  EXPECT_EQ(options.prompt, "");
}

TEST(RunOptions, BadValuesAreRefusedWithTheFlagAndTheText) {
  for (const char* arguments : {"-m m --budget 12parsecs", "-m m --budget 0%", "-m m --io floppy",
                                "-m m --direct maybe", "-m m --policy belady", "-m m --log-level loud", "-m m -t 0",
                                "-m m -c 0", "-m m -n -2", "-m m --top-p 1.5", "-m m --temp -1"}) {
    EXPECT_THROW(parsed(arguments), CLI::ValidationError) << arguments;
  }
  try {
    parsed("-m m --budget 12parsecs");
    FAIL() << "was accepted";
  } catch (const CLI::ParseError& fault) {
    const std::string text = fault.what();
    EXPECT_NE(text.find("budget"), std::string::npos) << text;
    EXPECT_NE(text.find("12parsecs"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

TEST(RunOptions, MicroBatchIsANumberOrAutomatic) {
  EXPECT_EQ(parsed("-m m").ubatch_tokens, 0u);
  EXPECT_EQ(parsed("-m m --ubatch auto").ubatch_tokens, 0u);
  EXPECT_EQ(parsed("-m m --ubatch 300").ubatch_tokens, 300u);
  for (const std::string wrong : {"0", "-1", "x", "12x", "9999999999"}) {
    EXPECT_THROW(parsed("-m m --ubatch " + wrong), CLI::ParseError) << wrong;
  }
}

TEST(RunOptions, SyntheticReadsCannotBeVerified) {
  const auto checked = [](const std::string& flags) {
    return check_engine_options(engine_options_with_flags({}, parsed("-m m " + flags)));
  };
  EXPECT_TRUE(checked("--io synthetic"));
  EXPECT_TRUE(checked("--verify-slots --verify-reads"));
  for (const std::string verify : {"slots", "reads"}) {
    const Status refused = checked("--io synthetic --verify-" + verify);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadArgument);
    EXPECT_NE(refused.error().text.find("verify_" + verify), std::string::npos) << refused.error().text;
  }
}

TEST(RunOptions, UnknownAndMissingFlagsAreRefused) {
  EXPECT_THROW(parsed("-m m --bogus"), CLI::ExtrasError);
  EXPECT_THROW(parsed("-p Hi"), CLI::RequiredError);
}

TEST(RunOptions, ContradictionsAreTold) {
  EXPECT_TRUE(check_run_options(parsed("-m m -p Hi"), false));
  EXPECT_TRUE(check_run_options(parsed("-m m"), true));
  EXPECT_FALSE(check_run_options(parsed("-m m -p Hi -f file"), false));
  EXPECT_FALSE(check_run_options(parsed("-m m -p Hi --raw --system Sys"), false));
  EXPECT_FALSE(check_run_options(parsed("-m m -p Hi --ignore-eos -n -1"), false));
  EXPECT_FALSE(check_run_options(parsed("-m m -p Hi -q -v"), false));
  EXPECT_TRUE(check_run_options(parsed("-m m --tokens t.json"), false));
  EXPECT_FALSE(check_run_options(parsed("-m m --tokens t.json"), true));
  EXPECT_FALSE(check_run_options(parsed("-m m --logits l.bin"), true));
}

TEST(RunOptions, FlagsWinOverTheEnvironmentAndLeaveTheRest) {
  EngineOptions environment;
  environment.budget = {.kind = BudgetSpec::Kind::kBytes, .bytes = 123};
  environment.io.path = IoPath::kUring;
  environment.io.depth = 5;
  environment.direct = DirectMode::kOff;
  environment.policy = PolicyKind::kLfu;
  environment.fit = false;
  environment.fused = FusedMode::kRequire;

  const EngineOptions untouched = engine_options_with_flags(environment, parsed("-m m"));
  EXPECT_EQ(untouched.budget.bytes, 123u);
  EXPECT_EQ(untouched.io.path, IoPath::kUring);
  EXPECT_EQ(untouched.direct, DirectMode::kOff);
  EXPECT_EQ(untouched.policy, PolicyKind::kLfu);
  EXPECT_FALSE(untouched.fit);
  EXPECT_EQ(untouched.fused, FusedMode::kRequire);
  EXPECT_FALSE(untouched.verify_slots);

  const EngineOptions laid_over = engine_options_with_flags(
      environment, parsed("-m m --budget auto --io pread --policy lru --fit on --fused off --verify-slots"));
  EXPECT_EQ(laid_over.budget.kind, BudgetSpec::Kind::kAuto);
  EXPECT_EQ(laid_over.io.path, IoPath::kPread);
  EXPECT_EQ(laid_over.io.depth, 5u);
  EXPECT_EQ(laid_over.direct, DirectMode::kOff);
  EXPECT_EQ(laid_over.policy, PolicyKind::kLru);
  EXPECT_TRUE(laid_over.fit);
  EXPECT_EQ(laid_over.fused, FusedMode::kOff);
  EXPECT_TRUE(laid_over.verify_slots);
}

}  // namespace
}  // namespace sluice
