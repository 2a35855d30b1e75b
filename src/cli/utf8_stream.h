// Cuts a stream of bytes at UTF-8 character boundaries, so that a terminal or a pipe never sees half a character:
// a token's text may end in the middle of one. Not a converter: valid bytes pass unchanged, each byte that cannot
// belong to a character becomes U+FFFD.
//
// Holds    at most three bytes, the beginning of a character that is not complete yet.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

class Utf8Stream {
 public:
  // The complete characters that are there after `bytes` arrived.
  std::string feed(std::string_view bytes);
  // The end of the text: what is still held can no longer become a character.
  std::string finish();

 private:
  std::string held_;
};

}  // namespace sluice
