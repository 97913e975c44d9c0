#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <string>
#include <thread>

#include "collective_calls.h"
#include "collectives/exchange_communicator.h"
#include "contributions.h"
#include "core/error.h"
#include "engine/progress_engine.h"
#include "local_network.h"
#include "transport_laws.h"

using namespace samestep;

namespace {

struct World {
  explicit World(int size, std::size_t message_limit = 1 << 30, std::size_t segment_bytes = 0)
      : network(std::make_shared<LocalNetwork>(size)), max_message(message_limit), piece(segment_bytes) {}
  std::shared_ptr<Communicator> join(int rank) {
    ExchangeOptions options;
    options.oversubscribed = true;
    options.inline_limit = 64;
    options.segment_bytes = piece;
    return std::make_shared<ExchangeCommunicator>(std::make_unique<LocalTransport>(network, rank, max_message),
                                                  options);
  }
  std::shared_ptr<LocalNetwork> network;
  std::size_t max_message, piece;
};

constexpr std::size_t kCounts[] = {0, 1, 2, 5, 16, 17, 1000, 20'003};

}  // namespace

TEST_CASE("reductions: one-shot and two-shot, in place, every root") {
  for (const int size : {1, 2, 3, 4}) {
    World world(size, /*max_message=*/1 << 30, /*piece=*/1024);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t count : kCounts) {
        Floats all = contribution(rank, count);
        allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
        REQUIRE(all == sum(size, count));
        for (int root = 0; root < size; ++root) {
          Floats one = contribution(rank, count);
          reduce(*group, buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
          REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
          Floats sent = contribution(rank, count);
          bcast(*group, buffer(sent), root, shape(sent))->wait(soon());
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
    allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 5003));
    Floats mine = contribution(rank, 501), everyone(501 * size);
    allgather(*group, buffer(mine), buffer(everyone), shape(mine))->wait(soon());
    for (int r = 0; r < size; ++r) REQUIRE(everyone[static_cast<std::size_t>(r) * 501 + 500] == element(r, 500));
    group->close(soon());
  });
}

TEST_CASE("messages in segments: either end may have it whole") {
  constexpr std::size_t kSegment = 1000, kCount = 1301;  // 5204 bytes: six segments of 868 bytes
  World world(2);
  as_threads(2, [&](int rank) {
    const auto group = std::static_pointer_cast<ExchangeCommunicator>(world.join(rank));
    GroupSettings settings;
    settings.message_segment = kSegment;
    group->configure(settings);
    ProgressEngine& engine = *group->engine_of_group();
    Floats elements = contribution(7, kCount);
    const auto* const sent = reinterpret_cast<const std::byte*>(elements.data());
    for (const bool whole_at_sender : {false, true}) {
      for (const bool whole_at_receiver : {false, true}) {
        const auto body = std::make_shared<MessageBody>();
        std::vector<Communicator::WorkPtr> works;
        Floats received(kCount + 10, -1.0F);
        auto* const to = reinterpret_cast<std::byte*>(received.data());
        const Buffer out = buffer(received);
        if (rank == 0 && whole_at_sender) {
          works.push_back(group->send(buffer(elements), 1, 3));
        } else if (rank == 0) {
          works.push_back(group->send_first({buffer(elements), 1, 3}, body));
          const int tag = tags::of_body(body->number);
          for (int i = 0; i < 2 * tags::kBodies; ++i) REQUIRE(tags::of_body(engine.next_body_id()) != tag);
          for (std::size_t at = body->segment_nbytes; at < body->nbytes; at += body->segment_nbytes) {
            works.push_back(group->send_segment(*body, at, sent + at));
          }
        } else if (whole_at_receiver) {
          works.push_back(group->recv(out, 0, 3));
        } else {
          const auto header = group->receive_header({out, 0, 3}, body);
          header->wait(soon());
          REQUIRE(header->status().count == kCount);
          REQUIRE(body->nbytes == kCount * sizeof(float));
          REQUIRE(body->segment_nbytes == 868);
          for (std::size_t at = 0; at < body->nbytes; at += body->segment_nbytes) {
            works.push_back(group->receive_segment(*body, at, to + at));
          }
        }
        for (const auto& work : works) work->wait(soon());
        if (rank == 1) {
          REQUIRE(std::equal(elements.begin(), elements.end(), received.begin()));
          REQUIRE(std::all_of(received.begin() + kCount, received.end(), [](float x) { return x == -1.0F; }));
        } else if (!whole_at_sender) {  // its tag is used again
          const auto has_tag = [&](int i) { return i == tags::of_body(body->number); };
          bool is_free = false;
          for (int i = 0; i < tags::kBodies; ++i) is_free = is_free || has_tag(tags::of_body(engine.next_body_id()));
          REQUIRE(is_free);
        }
      }
    }
    group->close(soon());
  });
}

TEST_CASE("a header that the transport has lost is noticed") {
  const int size = 3;
  World world(size);
  world.network->loses_from = 1;
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    std::string text;
    try {
      std::vector<Communicator::WorkPtr> works;
      for (int i = 0; i < 2; ++i) works.push_back(barrier(*group));
      for (const auto& work : works) work->wait(soon());
    } catch (const Error& error) {
      text = error.what();
    }
    CAPTURE(text);
    // It was the header for the next rank. The others have both barriers, or learn that it has left before the second.
    const auto says = [&](const char* what) { return text.find(what) != text.npos; };
    if (rank == 2) {
      REQUIRE(says("rank 1 is at operation 1; messages were lost or mixed up"));
      REQUIRE_FALSE(says("has left"));
    } else {
      REQUIRE((text.empty() || says("rank 2 has left group 'world'")));
    }
  });
}

TEST_CASE("many pending operations, finished in any order") {
  const int size = 3;
  World world(size, 1 << 30, 1024);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    constexpr std::size_t kMany = 24;
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (std::size_t i = 0; i < kMany; ++i) values.push_back(contribution(rank, 1 + 97 * i));
    for (Floats& v : values) works.push_back(allreduce(*group, buffer(v), buffer(v), {}, shape(v)));
    for (std::size_t i = kMany; i-- > 0;) {
      works[(i * 7) % kMany]->wait(soon());
      REQUIRE(values[(i * 7) % kMany] == sum(size, values[(i * 7) % kMany].size()));
    }
    group->close(soon());
  });
}

TEST_CASE("a difference raises the same text on every rank, and the group stays usable") {
  World world(3);
  check_that_a_difference_is_reported(world, 3, 3);
}

TEST_CASE("a missing rank is named, and learns that the others have given up") {
  const int size = 3;
  World world(size);
  std::atomic<int> gave_up = 0;
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats values(3);
    if (rank == 2) {
      while (gave_up != 2) std::this_thread::yield();
      // What the others sent before they gave up is here, so the first operation may still end well.
      CHECK_THROWS_AS(for (int i = 0; i < 2; ++i) barrier(*group)->wait(soon()), PeerLostError);
      return;
    }
    const auto work = barrier(*group);
    try {
      work->wait(Deadline::after(Seconds(0.05)));
      FAIL("the deadline should have passed");
    } catch (const TimeoutError& error) {
      // "rank 2", or "ranks 1, 2" where the network pretended once more that rank 1's message is not here.
      CHECK(std::string(error.what()).find(" 2") != std::string::npos);
      group->abandon(std::current_exception(), error.what());
    } catch (const PeerLostError&) {  // the other survivor timed out first, and counted this rank as late
    }
    ++gave_up;
    CHECK_THROWS_AS(barrier(*group)->wait(soon()), Error);
  });
}

TEST_CASE("point to point: order, any source, any tag, long bodies, differing counts") {
  World world(3);
  check_point_to_point(world, 3, {0, 3, 5000});
}

TEST_CASE("two threads of a rank may wait at the same time") {
  const int size = 2;
  World world(size, 1 << 30, 1024);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    for (int round = 0; round < 20; ++round) {
      Floats a = contribution(rank, 3000), b = contribution(rank, 7);
      const auto first = allreduce(*group, buffer(a), buffer(a), {}, shape(a));
      const auto second = allreduce(*group, buffer(b), buffer(b), {}, shape(b));
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
  const auto engine = std::make_shared<ProgressEngine>(
      std::make_unique<LocalTransport>(world.network, 0, world.max_message), ExchangeOptions{});
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
