#include "loader/prefetch_governor.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

namespace sluice {
namespace {

struct Course {
  double seconds = 0;
  double seconds_off = 0;  // had it never prefetched
  uint64_t forwards_on = 0;
};

// A machine on which a forward takes 1 ms without prefetching and `factor(forward)` of it with; single forwards vary by
// a tenth, and one in fifty takes five times as long.
Course drive(PrefetchGovernor& governor, uint64_t forwards, const std::function<double(uint64_t)>& factor,
             uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> vary(0.95, 1.05);
  Course course;
  for (uint64_t i = 0; i < forwards; ++i) {
    const double off = 1e-3 * vary(random) * (random() % 50 == 0 ? 5 : 1);
    const double seconds = governor.enabled() ? off * factor(i) : off;
    course.forwards_on += governor.enabled();
    course.seconds += seconds;
    course.seconds_off += off;
    governor.note_forward(seconds);
  }
  return course;
}

TEST(PrefetchGovernor, TakesAGain) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    PrefetchGovernor governor({});
    const Course course = drive(
        governor, 4000, [](uint64_t) { return 0.7; }, seed);
    EXPECT_LT(course.seconds, 0.8 * course.seconds_off) << seed;
    EXPECT_GT(course.forwards_on, 3000u) << seed;
    EXPECT_EQ(governor.switches(), 1u) << seed;
  }
}

TEST(PrefetchGovernor, ALossCostsOnePerCentAndTheFirstLook) {
  for (const double factor : {1.02, 1.1, 1.5, 3.0}) {
    for (const uint64_t forwards : {32, 64, 400, 1000, 20000}) {
      for (uint64_t seed = 1; seed <= 5; ++seed) {
        PrefetchGovernor governor({});
        const Course course = drive(
            governor, forwards, [&](uint64_t) { return factor; }, seed);
        // The first window of six forwards cannot know; one of them may be a slow one.
        const double allowed = factor <= 1.02 ? 0.01 : 0.01 + 10 * (factor - 1) / static_cast<double>(forwards);
        EXPECT_LT(course.seconds, (1 + allowed) * course.seconds_off) << factor << ", " << forwards << " forwards";
      }
    }
  }
}

TEST(PrefetchGovernor, NoGainIsNotTaken) {
  PrefetchGovernor governor({});
  const Course course = drive(governor, 20000, [](uint64_t) { return 1.0; });
  EXPECT_LT(course.forwards_on, 2000u);
}

TEST(PrefetchGovernor, ComesBackWhenItPaysAgain) {
  PrefetchGovernor governor({});
  // Good, then a busy drive, then good again.
  const auto factor = [](uint64_t forward) { return forward < 2000 || forward >= 6000 ? 0.6 : 1.3; };
  drive(governor, 2000, factor);
  EXPECT_TRUE(governor.enabled());
  drive(governor, 1000, [&](uint64_t i) { return factor(i + 2000); });
  EXPECT_FALSE(governor.enabled());
  drive(governor, 12000, [&](uint64_t i) { return factor(i + 6000); });
  EXPECT_TRUE(governor.enabled());
  EXPECT_EQ(governor.switches(), 3u);
}

TEST(PrefetchGovernor, ALayerThatIsPredictedBadlyRests) {
  PrefetchGovernor governor({.rest_forwards_min = 100000});
  drive(governor, 300, [](uint64_t) { return 0.5; });
  ASSERT_TRUE(governor.enabled());
  governor.note_layer(3, 100, 10);
  governor.note_layer(4, 100, 80);
  EXPECT_FALSE(governor.enabled(3));
  EXPECT_TRUE(governor.enabled(4));
  EXPECT_TRUE(governor.enabled(5));
  drive(governor, 1100, [](uint64_t) { return 0.5; });
  EXPECT_TRUE(governor.enabled(3));
}

}  // namespace
}  // namespace sluice
