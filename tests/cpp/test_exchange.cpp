#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>

#include "contributions.h"
#include "core/error.h"
#include "exchange/engine.h"
#include "exchange/exchange_communicator.h"
#include "local_network.h"

using namespace samestep;

namespace {

Deadline soon() { return Deadline::after(Seconds(60)); }

struct World {
  explicit World(int size, std::size_t longest_message = 1 << 30, std::size_t window_piece = 0)
      : network(std::make_shared<LocalNetwork>(size)), max_message(longest_message), piece(window_piece) {}
  std::shared_ptr<Communicator> join(int rank) {
    ExchangeOptions options;
    options.oversubscribed = true;
    options.inline_limit = 64;
    options.window_piece = piece;
    return std::make_shared<ExchangeCommunicator>(std::make_unique<LocalMessenger>(network, rank, max_message),
                                                  options);
  }
  std::shared_ptr<LocalNetwork> network;
  std::size_t max_message, piece;
};

Buffer buffer(Floats& values) { return {values.data(), values.size(), DType::float32}; }
Shape shape(const Floats& values) { return Shape::flat(values.size()); }

constexpr std::size_t kCounts[] = {0, 1, 2, 5, 16, 17, 1000, 20'003};

}  // namespace

TEST_CASE("reductions: short and windowed, in place, every root") {
  for (const int size : {1, 2, 3, 4}) {
    World world(size, /*max_message=*/1 << 30, /*piece=*/1024);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t count : kCounts) {
        Floats all = contribution(rank, count);
        group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
        REQUIRE(all == sum(size, count));
        for (int root = 0; root < size; ++root) {
          Floats one = contribution(rank, count);
          group->reduce(buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
          REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
          Floats sent = contribution(rank, count);
          group->broadcast(buffer(sent), root, shape(sent))->wait(soon());
          REQUIRE(sent == contribution(root, count));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("long messages are cut where the transport needs it") {
  const int size = 3;
  World world(size, /*max_message=*/300, /*piece=*/4096);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats all = contribution(rank, 5003);
    group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 5003));
    Floats mine = contribution(rank, 501), everyone(501 * size);
    group->all_gather(buffer(mine), buffer(everyone), shape(mine))->wait(soon());
    for (int r = 0; r < size; ++r) REQUIRE(everyone[static_cast<std::size_t>(r) * 501 + 500] == element(r, 500));
    group->close(soon());
  });
}

TEST_CASE("many operations under way, finished in any order") {
  const int size = 3;
  World world(size, 1 << 30, 1024);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    constexpr std::size_t kMany = 24;
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (std::size_t i = 0; i < kMany; ++i) values.push_back(contribution(rank, 1 + 97 * i));
    for (Floats& v : values) works.push_back(group->all_reduce(buffer(v), buffer(v), {}, shape(v)));
    for (std::size_t i = kMany; i-- > 0;) {
      works[(i * 7) % kMany]->wait(soon());
      REQUIRE(values[(i * 7) % kMany] == sum(size, values[(i * 7) % kMany].size()));
    }
    group->close(soon());
  });
}

TEST_CASE("a difference raises the same text on every rank, and the group goes on") {
  const int size = 3;
  World world(size);
  std::vector<std::string> texts(size);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats odd(rank == 1 ? 4 : 3);
    try {
      group->all_reduce(buffer(odd), buffer(odd), {}, shape(odd))->wait(soon());
    } catch (const MismatchError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    Floats all = contribution(rank, 2000);
    group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 2000));
    group->close(soon());
  });
  CHECK(texts[0].find("float32[4]") != std::string::npos);
  CHECK(texts[0] == texts[1]);
  CHECK(texts[1] == texts[2]);
}

TEST_CASE("a rank that does not come is named, and learns that the others have given up") {
  const int size = 3;
  World world(size);
  std::atomic<int> gave_up = 0;
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats values(3);
    if (rank == 2) {
      while (gave_up != 2) std::this_thread::yield();
      // What the others sent before they gave up is here, so the first operation may still end well.
      CHECK_THROWS_AS(for (int i = 0; i < 2; ++i) group->barrier()->wait(soon()), PeerLostError);
      return;
    }
    const auto work = group->barrier();
    try {
      work->wait(Deadline::after(Seconds(0.05)));
      FAIL("the deadline should have passed");
    } catch (const TimeoutError& error) {
      // "rank 2", or "ranks 1, 2" where the network pretended once more that rank 1's message is not here.
      CHECK(std::string(error.what()).find(" 2") != std::string::npos);
      group->abandon(std::current_exception(), error.what());
    } catch (const PeerLostError&) {  // the other survivor gave up first
    }
    ++gave_up;
    CHECK_THROWS_AS(group->barrier()->wait(soon()), Error);
  });
}

TEST_CASE("point to point: order, any source, any tag, long bodies, differing counts") {
  const int size = 3;
  World world(size);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{5000}}) {
      if (rank != 0) {
        Floats values = contribution(rank, count);
        group->send(buffer(values), 0, rank)->wait(soon());
        group->send(buffer(values), 0, 7)->wait(soon());
      } else {
        for (int source = size - 1; source > 0; --source) {
          Floats values(count);
          const auto work = group->recv(buffer(values), source, kAnyTag);
          work->wait(soon());
          REQUIRE(work->status().tag == source);
          REQUIRE(values == contribution(source, count));
        }
        for (int i = 1; i < size; ++i) {
          Floats values(count + 1);
          const auto work = group->recv(buffer(values), kAnySource, 7);
          REQUIRE_THROWS_AS(work->wait(soon()), MismatchError);
        }
      }
      group->barrier()->wait(soon());
    }
    group->close(soon());
  });
}

TEST_CASE("two threads of a rank may wait at the same time") {
  const int size = 2;
  World world(size, 1 << 30, 1024);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    for (int round = 0; round < 20; ++round) {
      Floats a = contribution(rank, 3000), b = contribution(rank, 7);
      const auto first = group->all_reduce(buffer(a), buffer(a), {}, shape(a));
      const auto second = group->all_reduce(buffer(b), buffer(b), {}, shape(b));
      std::thread other([&] { second->wait(soon()); });
      first->wait(soon());
      other.join();
      REQUIRE(a == sum(size, 3000));
      REQUIRE(b == sum(size, 7));
    }
    group->close(soon());
  });
}

TEST_CASE("a child forked while another thread is inside a group does not wait for it, and is refused") {
  const World world(2);
  const auto engine = std::make_shared<Engine>(std::make_unique<LocalMessenger>(world.network, 0, world.max_message),
                                               ExchangeOptions{});
  std::latch inside(1), forked(1);
  std::thread other([&] {
    const std::lock_guard lock(engine->mutex());
    inside.count_down();
    forked.wait();
  });
  inside.wait();
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr unsigned kHangs = 60;  // seconds
    ::alarm(kHangs);
    try {
      engine->progress();
    } catch (const NotInitializedError&) {
      ::_exit(engine->usable() ? 1 : 0);
    }
    ::_exit(1);
  }
  forked.count_down();
  other.join();
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(engine->usable());
  engine->progress();
}
