// A model's own chat template: messages in, the prompt text for the next answer out. The template language is
// llama-common's; what it throws ends here.
//
// Owns     the parsed template; independent of the model after construction.
// Errors   kUnsupported: the template cannot be parsed, or refuses these messages (its own words in the text).
// Threads  const after of().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"

struct llama_model;
struct common_chat_templates;

namespace sluice {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

class ChatTemplate {
 public:
  static bool model_has_one(const llama_model* model);
  static Result<ChatTemplate> of(const llama_model* model);

  // Ends where the assistant's next message begins. Without the begin-of-text token, which the tokenizer adds.
  Result<std::string> format(const std::vector<ChatMessage>& messages) const;

 private:
  struct Delete {
    void operator()(common_chat_templates* templates) const;
  };
  std::unique_ptr<common_chat_templates, Delete> templates_;
};

}  // namespace sluice
