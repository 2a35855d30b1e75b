#include "cli/generator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cli/signals.h"
#include "cli/utf8_stream.h"
#include "common.h"
#include "sampling.h"

namespace sluice {

void Generator::FreeSampler::operator()(common_sampler* sampler) const {
  common_sampler_free(sampler);
}

Result<std::unique_ptr<Generator>> Generator::create(ModelSession& session, const GeneratorOptions& options) {
  if (llama_vocab_type(session.vocab()) == LLAMA_VOCAB_TYPE_NONE) {
    return make_error(ErrorCode::kUnsupported, "'{}' has no vocabulary", session.catalog().files.front()->path());
  }
  if (llama_model_has_encoder(session.model()) || !llama_model_has_decoder(session.model())) {
    return make_error(ErrorCode::kUnsupported, "'{}' is no decoder-only language model",
                      session.catalog().files.front()->path());
  }
  common_params_sampling params;
  params.temp = options.temperature;
  params.top_k = options.top_k;
  params.top_p = options.top_p;
  params.min_p = options.min_p;
  params.seed = options.seed;
  params.no_perf = true;
  if (options.ignore_eos) {
    for (llama_token token = 0; token < llama_vocab_n_tokens(session.vocab()); ++token) {
      if (llama_vocab_is_eog(session.vocab(), token)) {
        params.logit_bias.push_back({token, -std::numeric_limits<float>::infinity()});
      }
    }
  }
  std::unique_ptr<Generator> generator(new Generator(session, options));
  generator->sampler_.reset(common_sampler_init(session.model(), params));
  if (!generator->sampler_) return make_error(ErrorCode::kUnsupported, "llama.cpp refuses the sampling settings");
  return generator;
}

uint32_t Generator::seed() const {
  return common_sampler_get_seed(sampler_.get());
}

// The tokens of a whole text. Where it continues what the memory holds, the memory's own tokens stand: an answer need
// not be cut into tokens again the way it was sampled.
std::vector<llama_token> Generator::tokens_of(const std::string& text) const {
  if (tokens_.empty() || !text.starts_with(text_)) return common_tokenize(session_.vocab(), text, true, true);
  std::vector<llama_token> tokens = tokens_;
  const std::vector<llama_token> added = common_tokenize(session_.vocab(), text.substr(text_.size()), false, true);
  tokens.insert(tokens.end(), added.begin(), added.end());
  return tokens;
}

void Generator::forget() {
  llama_memory_clear(llama_get_memory(session_.context()), true);
  tokens_.clear();
  text_.clear();
}

// Cuts the memory to its first `count` tokens; where the model cannot do that, to none. Returns what is kept.
size_t Generator::keep_in_memory(size_t count) {
  if (count == tokens_.size()) return count;
  const auto from = static_cast<llama_pos>(count);
  if (count == 0 || !llama_memory_seq_rm(llama_get_memory(session_.context()), 0, from, -1)) {
    forget();
    return 0;
  }
  tokens_.resize(count);
  return count;
}

Status Generator::read(const std::string& text, const ProgressCallback& on_progress) {
  const std::vector<llama_token> tokens = tokens_of(text);
  if (tokens.empty()) return make_error(ErrorCode::kBadArgument, "the prompt is empty");
  if (tokens.size() >= session_.context_tokens()) {
    return make_error(
        ErrorCode::kBadArgument,
        "the prompt has {} tokens and the context holds {}, of which the answer needs one: give a larger -c",
        tokens.size(), session_.context_tokens());
  }
  const size_t same = static_cast<size_t>(
      std::mismatch(tokens_.begin(), tokens_.end(), tokens.begin(), tokens.end()).second - tokens.begin());
  // At least one token is decoded, since its logits are wanted.
  const size_t kept = keep_in_memory(std::min(same, tokens.size() - 1));

  text_ = text;
  const size_t total = tokens.size() - kept;
  while (tokens_.size() < tokens.size()) {
    const size_t count = std::min<size_t>(session_.batch_tokens(), tokens.size() - tokens_.size());
    const llama_token* batch = tokens.data() + tokens_.size();
    Status decoded =
        stop_requested() ? Status(make_error(ErrorCode::kCancelled, "stopped")) : session_.decode(batch, count);
    if (!decoded) {
      forget();
      return decoded.error();
    }
    tokens_.insert(tokens_.end(), batch, batch + count);
    if (on_progress) on_progress(tokens_.size() - kept, total);
  }
  return {};
}

Result<Answer> Generator::answer(const TextCallback& on_text, const LogitsCallback& on_logits) {
  SLUICE_ASSERT(!tokens_.empty(), "answer before read");
  Answer answer;
  Utf8Stream characters;
  auto say = [&](const std::string& text) {
    if (text.empty()) return;
    answer.text += text;
    on_text(text);
  };
  const size_t tokens_max =
      options_.tokens_max < 0 ? std::numeric_limits<size_t>::max() : static_cast<size_t>(options_.tokens_max);
  const auto n_vocab = static_cast<size_t>(llama_vocab_n_tokens(session_.vocab()));

  answer.end = AnswerEnd::kTokensMax;
  while (answer.tokens.size() < tokens_max) {
    if (stop_requested()) {
      answer.end = AnswerEnd::kStopped;
      break;
    }
    if (on_logits) {
      const Status kept = on_logits(llama_get_logits_ith(session_.context(), -1), n_vocab);
      if (!kept) return kept.error();
    }
    const llama_token token = common_sampler_sample(sampler_.get(), session_.context(), -1);
    common_sampler_accept(sampler_.get(), token, true);
    answer.tokens.push_back(token);
    if (llama_vocab_is_eog(session_.vocab(), token)) {
      answer.end = AnswerEnd::kModel;
      break;
    }
    say(characters.feed(common_token_to_piece(session_.vocab(), token, false)));

    if (answer.tokens.size() == tokens_max) break;
    if (tokens_.size() == session_.context_tokens()) {
      answer.end = AnswerEnd::kContextFull;
      break;
    }
    if (Status decoded = session_.decode(&token, 1); !decoded) {
      forget();
      if (decoded.error().code != ErrorCode::kCancelled) return decoded.error();
      answer.end = AnswerEnd::kStopped;
      break;
    }
    ++answer.steps;
    tokens_.push_back(token);
    text_ += common_token_to_piece(session_.vocab(), token, true);
  }
  say(characters.finish());
  return answer;
}

}  // namespace sluice
