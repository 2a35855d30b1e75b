// The tokens that a benchmark decodes: windows of a text, none used twice in one state, or random tokens where there is
// no text. Measures nothing.
//
// Choice   the file that was asked for; else `heldout.txt` beside the model (as the bundled model has it); else random
//          ids from a fixed seed, whose routing is nobody's.
// Errors   kNotFound; kBadArgument when the text has fewer tokens than are needed, with both numbers.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "llama.h"

namespace sluice {

class BenchText {
 public:
  // `wanted_path` may be empty. `tokens_min`: of all windows together.
  static Result<BenchText> load(const std::string& wanted_path, const std::string& model_path, const llama_vocab* vocab,
                                size_t tokens_min);

  const std::string& source() const { return source_; }  // a path, or "random tokens"
  bool random() const { return random_; }
  std::span<const llama_token> window(size_t index, size_t tokens) const {
    return std::span(tokens_).subspan(index * tokens, tokens);
  }

 private:
  std::string source_;
  bool random_ = false;
  std::vector<llama_token> tokens_;
};

}  // namespace sluice
