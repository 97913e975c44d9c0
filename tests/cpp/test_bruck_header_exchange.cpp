#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>

#include "collective_calls.h"
#include "collectives/exchange_communicator.h"
#include "contributions.h"
#include "core/error.h"
#include "engine/bruck_header_exchange.h"
#include "local_network.h"

using namespace samestep;

namespace {

struct World {
  explicit World(int size) : network(std::make_shared<LocalNetwork>(size)) {}
  std::shared_ptr<Communicator> join(int rank) {
    ExchangeOptions options;
    options.oversubscribed = true;
    options.inline_limit = 128;
    options.bruck_above = 1;
    options.segment_bytes = 1024;
    return std::make_shared<ExchangeCommunicator>(std::make_unique<LocalTransport>(network, rank), options);
  }
  std::shared_ptr<LocalNetwork> network;
};

void check_reductions(Communicator& group, std::size_t count) {
  const int rank = group.rank(), size = group.size();
  Floats all = contribution(rank, count);
  allreduce(group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
  REQUIRE(all == sum(size, count));
  const int root = size / 2;
  Floats one = contribution(rank, count);
  reduce(group, buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
  REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
  Floats blocks;
  for (int block = 0; block < size; ++block) {
    const Floats part = contribution(rank, count);
    blocks.insert(blocks.end(), part.begin(), part.end());
  }
  Floats mine(count);
  reduce_scatter(group, buffer(blocks), buffer(mine), {}, Shape::flat(count))->wait(soon());
  REQUIRE(mine == sum(size, count));
}

void check_movement(Communicator& group, std::size_t count) {
  const int rank = group.rank(), size = group.size(), root = size - 1;
  const auto n = static_cast<std::size_t>(size);
  Floats sent = contribution(rank, count), mine = contribution(rank, count), everyone(n * count), into(n * count);
  bcast(group, buffer(sent), root, shape(sent))->wait(soon());
  REQUIRE(sent == contribution(root, count));
  allgather(group, buffer(mine), buffer(everyone), shape(mine))->wait(soon());
  for (int r = 0; r < size; ++r) {
    const Floats theirs = contribution(r, count);
    REQUIRE(std::equal(theirs.begin(), theirs.end(), everyone.begin() + r * static_cast<std::ptrdiff_t>(count)));
  }
  gather(group, buffer(mine), buffer(into), root, shape(mine))->wait(soon());
  if (rank == root) REQUIRE(into == everyone);
  Floats part(count);
  scatter(group, buffer(everyone), buffer(part), root, shape(part))->wait(soon());
  REQUIRE(part == mine);
  alltoall(group, buffer(everyone), buffer(into), shape(everyone))->wait(soon());
  for (std::size_t r = 0; r < n; ++r)
    REQUIRE(std::equal(mine.begin(), mine.end(), into.begin() + static_cast<std::ptrdiff_t>(r * count)));
}

}  // namespace

TEST_CASE("bruck header exchange: all verbs, short and long, among any number of ranks") {
  for (const int size : {1, 2, 3, 5, 8, 17}) {
    World world(size);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{13}, std::size_t{700}}) {
        check_reductions(*group, count);
        check_movement(*group, count);
      }
      group->close(soon());
    });
  }
}

TEST_CASE("bruck header exchange: log2 of the number of messages") {
  for (const auto& [size, messages] : {std::pair{2, 1}, {3, 2}, {8, 3}, {9, 4}, {17, 5}}) {
    World world(size);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      const std::uint64_t before = group->counters().messages;
      Floats values = contribution(rank, 5);
      const Clock::time_point begin = Clock::now();
      allreduce(*group, buffer(values), buffer(values), {}, shape(values))->wait(soon());
      REQUIRE(values == sum(size, 5));
      const auto sent = static_cast<int>(group->counters().messages - before);
      // A rank that has waited for a second says so to each other one.
      const bool may_notify = Clock::now() - begin >= Seconds(1);
      REQUIRE((sent == messages || (may_notify && sent == messages + size - 1)));
      group->close(soon());
    });
  }
}

TEST_CASE("bruck header exchange: many pending operations, finished in any order") {
  const int size = 6;
  World world(size);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    constexpr std::size_t kMany = 150;  // more than once around of everything
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (std::size_t i = 0; i < kMany; ++i) values.push_back(contribution(rank, 1 + i % 40));
    for (Floats& v : values) works.push_back(allreduce(*group, buffer(v), buffer(v), {}, shape(v)));
    for (std::size_t i = kMany; i-- > 0;) {
      works[(i * 7) % kMany]->wait(soon());
      REQUIRE(values[(i * 7) % kMany] == sum(size, values[(i * 7) % kMany].size()));
    }
    group->close(soon());
  });
}

TEST_CASE("bruck header exchange: a difference raises the same text on every rank, and the group stays usable") {
  for (const int size : {2, 5, 8}) {
    for (const int odd_one : {0, size - 1}) {
      World world(size);
      std::vector<std::string> texts(static_cast<std::size_t>(size));
      as_threads(size, [&](int rank) {
        const auto group = world.join(rank);
        Floats odd(rank == odd_one ? 4 : 3);
        try {
          if (rank == odd_one) {
            bcast(*group, buffer(odd), 0, shape(odd))->wait(soon());
          } else {
            allreduce(*group, buffer(odd), buffer(odd), {}, shape(odd))->wait(soon());
          }
        } catch (const MismatchError& error) {
          texts[static_cast<std::size_t>(rank)] = error.what();
        }
        check_reductions(*group, 500);
        group->close(soon());
      });
      for (const std::string& text : texts) CHECK(text == texts[0]);
      CHECK(texts[0].find("rank " + std::to_string(odd_one) + ": bcast of float32[4]") != std::string::npos);
    }
  }
}

TEST_CASE("bruck header exchange: a missing rank is named alone once the others have sent notices") {
  const int size = 5;
  World world(size);
  std::atomic<int> gave_up = 0;
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    barrier(*group)->wait(soon());
    if (rank == 2) {
      while (gave_up != size - 1) std::this_thread::yield();
      CHECK_THROWS_AS(for (int i = 0; i < 2; ++i) barrier(*group)->wait(soon()), PeerLostError);
      return;
    }
    const auto work = barrier(*group);
    bool waits = true;
    for (const Deadline deadline = soon(); waits;) {  // until the notices of all have come, which are sent after 1 s
      try {
        work->wait(Deadline::after(Seconds(1.5)));
        FAIL("the deadline should have passed");
      } catch (const TimeoutError& error) {
        const std::string text = error.what();
        const bool first = text.find("for rank 2; arrived: ranks 0, 1, 3, 4") != std::string::npos;
        const bool named = first || text.find("waits for rank 2; rank ") != std::string::npos;
        if (!named && !deadline.passed()) continue;
        CHECK(named);
        group->abandon(std::current_exception(), error.what());
      } catch (const PeerLostError&) {  // another survivor gave up first
        group->abandon(std::current_exception(), "a peer gave up");
      }
      waits = false;
    }
    ++gave_up;
  });
}
