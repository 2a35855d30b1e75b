#include "cli/chat_template.h"

#include <exception>

#include "chat.h"
#include "llama.h"

namespace sluice {

void ChatTemplate::Delete::operator()(common_chat_templates* templates) const {
  common_chat_templates_free(templates);
}

bool ChatTemplate::model_has_one(const llama_model* model) {
  return llama_model_chat_template(model, nullptr) != nullptr;
}

Result<ChatTemplate> ChatTemplate::of(const llama_model* model) {
  ChatTemplate chat;
  try {
    chat.templates_.reset(common_chat_templates_init(model, "").release());
  } catch (const std::exception& fault) {
    return make_error(ErrorCode::kUnsupported, "the model's chat template cannot be used ({}): --raw does without it",
                      fault.what());
  }
  return chat;
}

Result<std::string> ChatTemplate::format(const std::vector<ChatMessage>& messages) const {
  common_chat_templates_inputs inputs;
  for (const ChatMessage& message : messages) {
    common_chat_msg& out = inputs.messages.emplace_back();
    out.role = message.role;
    out.content = message.content;
  }
  try {
    return common_chat_templates_apply(templates_.get(), inputs).prompt;
  } catch (const std::exception& fault) {
    return make_error(ErrorCode::kUnsupported, "the chat template refuses the messages: {}", fault.what());
  }
}

}  // namespace sluice
