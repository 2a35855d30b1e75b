// Text in, text out, on one sequence of a loaded model: knows what text the model's memory holds, decodes only what is
// new, samples the answer. Knows no chat roles (cli/chat_template.h) and prints nothing.
//
// States   read(text): the memory holds text, ready to answer. answer(): the memory holds text and the answer, except
//          for the answer's last token, which nothing needed yet.
// Memory   read() keeps the longest part that stays the same. Models whose memory cannot be cut (recurrent ones) start
//          over when the new text is not a continuation of the old.
// Errors   those of ModelSession::decode; kBadArgument when the text does not fit into the context or is empty.
//          After kCancelled the memory is empty, and the next read starts over.
// Threads  thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cli/model_session.h"

struct common_sampler;

namespace sluice {

struct GeneratorOptions {
  int32_t tokens_max = 256;  // of one answer; negative: no limit but the context
  float temperature = 0.8f;
  int32_t top_k = 40;
  float top_p = 0.95f;
  float min_p = 0.05f;
  uint32_t seed = UINT32_MAX;
  bool ignore_eos = false;
};

enum class AnswerEnd {
  kModel,        // the model ended it
  kTokensMax,    // as many tokens as were allowed
  kContextFull,  // no room for another token
  kStopped,      // a stop signal
};

struct Answer {
  AnswerEnd end = AnswerEnd::kModel;
  std::string text;                 // valid UTF-8
  std::vector<llama_token> tokens;  // as sampled, the end-of-text token included
  uint64_t steps = 0;               // tokens decoded one at a time: one less than sampled, the last needs none
};

class Generator {
 public:
  static Result<std::unique_ptr<Generator>> create(ModelSession& session, const GeneratorOptions& options);

  // Called after each batch of a prompt with the tokens done and all that are to do.
  using ProgressCallback = std::function<void(size_t done, size_t total)>;
  Status read(const std::string& text, const ProgressCallback& on_progress);

  // The logits [n_vocab] that the next token is about to be chosen from.
  using LogitsCallback = std::function<Status(const float* logits, size_t n_vocab)>;
  using TextCallback = std::function<void(std::string_view text)>;  // whole characters, as they come
  Result<Answer> answer(const TextCallback& on_text, const LogitsCallback& on_logits);

  // What the memory holds.
  const std::string& text() const { return text_; }
  const std::vector<llama_token>& tokens() const { return tokens_; }
  uint32_t seed() const;

 private:
  struct FreeSampler {
    void operator()(common_sampler* sampler) const;
  };

  Generator(ModelSession& session, const GeneratorOptions& options) : session_(session), options_(options) {}
  std::vector<llama_token> tokens_of(const std::string& text) const;
  size_t keep_in_memory(size_t count);
  void forget();

  ModelSession& session_;
  GeneratorOptions options_;
  std::unique_ptr<common_sampler, FreeSampler> sampler_;
  std::string text_;
  std::vector<llama_token> tokens_;
};

}  // namespace sluice
