#include "cli/utf8_stream.h"

#include <gtest/gtest.h>

#include <string>

namespace sluice {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

TEST(Utf8Stream, PassesWholeCharactersAtOnce) {
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8C\x8A"), "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8C\x8A");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, EveryCutOfATextGivesTheSameText) {
  const std::string text = "x\xC3\xA9y\xE2\x82\xACz\xF0\x9F\x8C\x8A!";
  for (size_t first = 0; first <= text.size(); ++first) {
    for (size_t second = first; second <= text.size(); ++second) {
      Utf8Stream stream;
      std::string out = stream.feed(text.substr(0, first));
      out += stream.feed(text.substr(first, second - first));
      out += stream.feed(text.substr(second));
      out += stream.finish();
      EXPECT_EQ(out, text) << first << ' ' << second;
    }
  }
}

TEST(Utf8Stream, HoldsOnlyTheIncompleteCharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("ab\xF0\x9F\x8C"), "ab");
  EXPECT_EQ(stream.feed("\x8A"), "\xF0\x9F\x8C\x8A");
}

TEST(Utf8Stream, ReplacesEachByteThatCannotBelongToACharacter) {
  const std::string replacement = kReplacement;
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("a\x80z"), "a" + replacement + "z");
  EXPECT_EQ(stream.feed("\xFFz"), replacement + "z");
  EXPECT_EQ(stream.feed("\xC3z"), replacement + "z") << "a lead without its second byte";
  EXPECT_EQ(stream.feed("\xC0\xAFz"), replacement + replacement + "z") << "an overlong form";
  EXPECT_EQ(stream.feed("\xED\xA0\x80"), replacement + replacement + replacement) << "a surrogate";
  EXPECT_EQ(stream.feed("\xF4\x90\x80\x80"), replacement + replacement + replacement + replacement) << "above U+10FFFF";
}

TEST(Utf8Stream, EndInsideACharacterIsTold) {
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("a\xE2\x82"), "a");
  EXPECT_EQ(stream.finish(), std::string(kReplacement) + kReplacement);
  EXPECT_EQ(stream.finish(), "") << "told once";
}

}  // namespace
}  // namespace sluice
