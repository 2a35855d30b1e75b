#include "cli/bench_text.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <system_error>

#include "common.h"

namespace sluice {

namespace {

constexpr uint32_t kRandomSeed = 1;

std::vector<llama_token> random_tokens(const llama_vocab* vocab, size_t count) {
  std::mt19937 random(kRandomSeed);
  const auto n_vocab = static_cast<uint32_t>(llama_vocab_n_tokens(vocab));
  std::vector<llama_token> tokens;
  tokens.reserve(count);
  while (tokens.size() < count) tokens.push_back(static_cast<llama_token>(random() % n_vocab));
  return tokens;
}

}  // namespace

Result<BenchText> BenchText::load(const std::string& wanted_path, const std::string& model_path,
                                  const llama_vocab* vocab, size_t tokens_min) {
  BenchText text;
  text.source_ = wanted_path;
  if (text.source_.empty()) {
    const std::filesystem::path beside = std::filesystem::path(model_path).parent_path() / "heldout.txt";
    std::error_code failed;
    if (std::filesystem::is_regular_file(beside, failed)) text.source_ = beside.string();
  }
  if (text.source_.empty()) {
    text.source_ = "random tokens";
    text.random_ = true;
    text.tokens_ = random_tokens(vocab, tokens_min);
    return text;
  }
  if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
    return make_error(ErrorCode::kUnsupported, "'{}' has no vocabulary for a text", model_path);
  }
  errno = 0;
  std::ifstream file(text.source_, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {
    return make_system_error(ErrorCode::kNotFound, errno, "cannot read the text '{}'", text.source_);
  }
  text.tokens_ = common_tokenize(vocab, content.str(), true, false);
  if (text.tokens_.size() < tokens_min) {
    return make_error(ErrorCode::kBadArgument,
                      "'{}' has {} tokens and {} are needed: fewer or shorter repetitions, or a longer --text",
                      text.source_, text.tokens_.size(), tokens_min);
  }
  return text;
}

}  // namespace sluice
