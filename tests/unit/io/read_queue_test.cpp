#include "io/read_queue.h"

#include <random>

#include "unit/io/io_fixtures.h"

namespace sluice {
namespace {

class ReadQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_.write("f", std::string(4096, 'x'));
    file_ = open_file(folder_.path_of("f"), DirectMode::kOff);
  }

  void push(uint64_t tag, ReadPriority priority) {
    queue_.push({.file = file_.get(),
                 .offset = 0,
                 .bytes = 1,
                 .bytes_needed = 1,
                 .destination = &byte_,
                 .tag = tag,
                 .priority = priority});
  }
  // Starts and finishes the next read; 0 when none is queued.
  uint64_t next_tag() {
    Read* read = queue_.start_next();
    return read == nullptr ? 0 : queue_.finish(read, ReadOutcome{Status(), 1, 0}).tag;
  }

  TempFolder folder_;
  std::shared_ptr<const File> file_;
  std::byte byte_{};
  ReadQueue queue_;
};

TEST_F(ReadQueueTest, DemandGoesFirstAndEachPriorityInOrder) {
  push(1, ReadPriority::kPrefetch);
  push(2, ReadPriority::kPrefetch);
  push(3, ReadPriority::kDemand);
  push(4, ReadPriority::kDemand);
  push(5, ReadPriority::kPrefetch);
  queue_.raise(5);
  queue_.raise(3);  // is demand already: keeps its place
  for (const uint64_t expected : {3u, 4u, 5u, 1u, 2u, 0u}) EXPECT_EQ(next_tag(), expected);
}

TEST_F(ReadQueueTest, CancelAndRaiseKnowOnlyQueuedReads) {
  push(1, ReadPriority::kDemand);
  push(2, ReadPriority::kPrefetch);
  Read* started = queue_.start_next();
  EXPECT_FALSE(queue_.cancel(1));
  EXPECT_TRUE(queue_.cancel(2));
  EXPECT_FALSE(queue_.cancel(2));
  EXPECT_FALSE(queue_.cancel(99));
  queue_.raise(1);
  queue_.raise(2);
  queue_.raise(99);
  EXPECT_EQ(queue_.in_flight_count(), 1u);
  EXPECT_EQ(queue_.queued_count(), 0u);
  queue_.finish(started, ReadOutcome{});
  EXPECT_EQ(queue_.find_in_flight(), nullptr);
  EXPECT_EQ(queue_.stats().cancelled, 1u);
  EXPECT_EQ(queue_.stats().reads, 1u);
}

// Against the slow twin: two plain vectors.
TEST_F(ReadQueueTest, RandomOperationsAgreeWithPlainLists) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> demand;
  std::vector<uint64_t> prefetch;
  uint64_t next = 1;
  for (int step = 0; step < 20000; ++step) {
    const uint64_t tag = next == 1 ? 1 : 1 + random() % next;
    const auto in_demand = std::find(demand.begin(), demand.end(), tag);
    const auto in_prefetch = std::find(prefetch.begin(), prefetch.end(), tag);
    switch (random() % 5) {
      case 0:
      case 1: {
        const bool is_demand = random() % 3 == 0;
        (is_demand ? demand : prefetch).push_back(next);
        push(next++, is_demand ? ReadPriority::kDemand : ReadPriority::kPrefetch);
        break;
      }
      case 2:
        EXPECT_EQ(queue_.cancel(tag), in_demand != demand.end() || in_prefetch != prefetch.end());
        if (in_demand != demand.end()) demand.erase(in_demand);
        if (in_prefetch != prefetch.end()) prefetch.erase(in_prefetch);
        break;
      case 3:
        queue_.raise(tag);
        if (in_prefetch != prefetch.end()) {
          prefetch.erase(in_prefetch);
          demand.push_back(tag);
        }
        break;
      case 4: {
        std::vector<uint64_t>& list = demand.empty() ? prefetch : demand;
        const uint64_t expected = list.empty() ? 0 : list.front();
        if (!list.empty()) list.erase(list.begin());
        ASSERT_EQ(next_tag(), expected);
        break;
      }
    }
    ASSERT_EQ(queue_.queued_count(), demand.size() + prefetch.size());
  }
  EXPECT_GT(queue_.stats().reads, 1000u);
  EXPECT_GT(queue_.stats().cancelled, 100u);
}

TEST_F(ReadQueueTest, MisuseIsCaught) {
  push(1, ReadPriority::kDemand);
  EXPECT_DEATH(push(1, ReadPriority::kDemand), "submitted a second time");
  EXPECT_DEATH(queue_.push({.file = file_.get(), .bytes = 1, .bytes_needed = 2, .destination = &byte_, .tag = 2}),
               "needs 2");
  EXPECT_DEATH(queue_.push({.file = nullptr, .bytes = 1, .bytes_needed = 1, .destination = &byte_, .tag = 2}),
               "without a file");
}

}  // namespace
}  // namespace sluice
