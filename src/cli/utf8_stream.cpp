#include "cli/utf8_stream.h"

#include <cstddef>
#include <cstdint>

namespace sluice {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// How the character that starts at the front of `text` looks.
struct Character {
  enum class State { kComplete, kIncomplete, kInvalid } state;
  size_t bytes;  // of a complete character
};

Character first_character(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Character::State::kComplete, 1};

  // The second byte's range is narrower after some leads: no overlong forms, no surrogates, nothing above U+10FFFF.
  size_t bytes = 0;
  uint8_t second_min = 0x80, second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    bytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    bytes = 3;
    if (lead == 0xE0) second_min = 0xA0;
    if (lead == 0xED) second_max = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    bytes = 4;
    if (lead == 0xF0) second_min = 0x90;
    if (lead == 0xF4) second_max = 0x8F;
  } else {
    return {Character::State::kInvalid, 1};
  }
  for (size_t i = 1; i < bytes; ++i) {
    if (i >= text.size()) return {Character::State::kIncomplete, 0};
    const uint8_t min = i == 1 ? second_min : uint8_t{0x80};
    const uint8_t max = i == 1 ? second_max : uint8_t{0xBF};
    if (byte(i) < min || byte(i) > max) return {Character::State::kInvalid, 1};
  }
  return {Character::State::kComplete, bytes};
}

}  // namespace

std::string Utf8Stream::feed(std::string_view bytes) {
  held_ += bytes;
  std::string_view rest = held_;
  std::string out;
  while (!rest.empty()) {
    const Character character = first_character(rest);
    if (character.state == Character::State::kIncomplete) break;
    out += character.state == Character::State::kComplete ? rest.substr(0, character.bytes) : kReplacement;
    rest.remove_prefix(character.bytes);
  }
  held_ = std::string(rest);
  return out;
}

std::string Utf8Stream::finish() {
  std::string out;
  for (size_t i = 0; i < held_.size(); ++i) out += kReplacement;
  held_.clear();
  return out;
}

}  // namespace sluice
