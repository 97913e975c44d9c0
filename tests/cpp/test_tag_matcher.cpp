#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "communicator/self_communicator.h"
#include "communicator/tag_matcher.h"
#include "core/error.h"

using namespace samestep;

namespace {

struct Message {
  int source, tag, number;
};
using Matcher = TagMatcher<int*, Message>;

const Deadline soon = Deadline::after(Seconds(20));

}  // namespace

TEST_CASE("tag matcher: a message meets the first posted receive that wants it") {
  Matcher matcher;
  int of_rank_1 = 0, any_source = 0, any_tag = 0;
  matcher.post(1, 5, &of_rank_1);
  matcher.post(kAnySource, 5, &any_source);
  matcher.post(0, kAnyTag, &any_tag);
  CHECK(matcher.match(2, 6) == nullptr);
  CHECK(matcher.match(1, 5) == &of_rank_1);
  CHECK(matcher.match(1, 5) == &any_source);
  CHECK(matcher.match(1, 5) == nullptr);
  CHECK(matcher.match(0, 77) == &any_tag);
  CHECK(!matcher.has_posted());
}

TEST_CASE("tag matcher: a receive meets the first message that it wants, in the order of arrival") {
  Matcher matcher;
  matcher.keep({1, 5, 10});
  matcher.keep({0, 5, 11});
  matcher.keep({0, 6, 12});
  matcher.keep({0, 5, 13});
  const auto take = [&](int source, int tag) {
    const Message* const found = matcher.find(source, tag);
    if (found == nullptr) return -1;
    const int number = found->number;
    matcher.drop(found);
    return number;
  };
  CHECK(matcher.find(0, 5, [](const Message& message) { return message.number > 11; })->number == 13);
  CHECK(take(2, kAnyTag) == -1);
  CHECK(take(0, 5) == 11);
  CHECK(take(kAnySource, 5) == 10);
  CHECK(take(0, kAnyTag) == 12);
  CHECK(take(kAnySource, kAnyTag) == 13);
  CHECK(!matcher.has_unexpected());
}

TEST_CASE("tag matcher: a receive that is withdrawn meets nothing") {
  Matcher matcher;
  int first = 0, second = 0, third = 0;
  matcher.post(0, 5, &first);
  matcher.post(0, 5, &second);
  matcher.post(0, 5, &third);
  CHECK(matcher.withdraw(&first));
  CHECK(!matcher.withdraw(&first));
  CHECK(matcher.match(0, 5) == &second);
  CHECK(matcher.withdraw_all() == std::vector<int*>{&third});
  CHECK(matcher.match(0, 5) == nullptr);
}

TEST_CASE("a group of one: messages to itself by tag, before and after their receives") {
  const auto group = make_self_communicator("self");
  std::uint64_t sent[] = {1, 2, 3}, received[] = {0, 0, 0};
  const auto buffer = [](std::uint64_t& x) { return Buffer{&x, 1, DType::uint64}; };
  const auto early = group->recv(buffer(received[2]), 0, 7);
  const auto probe = group->probe(kAnySource, kAnyTag);
  const auto given_up = group->recv(buffer(received[2]), 0, 9);
  CHECK(!early->done());
  group->send(buffer(sent[0]), 0, 4)->wait(soon);
  CHECK(probe->done());
  CHECK(probe->status().tag == 4);
  group->send(buffer(sent[1]), 0, 5)->wait(soon);
  group->send(buffer(sent[2]), 0, 7)->wait(soon);
  early->wait(soon);
  CHECK(received[2] == 3);
  CHECK(given_up->cancel());
  CHECK(!given_up->cancel());
  CHECK_THROWS_AS(given_up->wait(soon), TimeoutError);
  group->recv(buffer(received[1]), kAnySource, 5)->wait(soon);
  group->recv(buffer(received[0]), kAnySource, kAnyTag)->wait(soon);
  CHECK(received[0] == 1);
  CHECK(received[1] == 2);
  const auto pending = group->recv(buffer(received[0]), 0, kAnyTag);
  group->abandon(std::make_exception_ptr(PeerLostError("over")), "over");
  CHECK_THROWS_AS(pending->wait(soon), PeerLostError);
  const auto closed = make_self_communicator("self");
  const auto too_late = closed->recv(buffer(received[0]), 0, kAnyTag);
  closed->close(soon);
  CHECK_THROWS_AS(too_late->wait(soon), NotInitializedError);
}

TEST_CASE("a group of one: what several threads receive while it ends is over for all of them") {
  for (int round = 0; round < 300; ++round) {
    const auto group = make_self_communicator("self");
    std::atomic<int> n_named = 0, n_posted = 0, n_pending = 0;
    std::array<std::string, 3> names;
    std::vector<std::thread> threads;
    for (std::string& name : names) {
      threads.emplace_back([&] {
        std::vector<Communicator::WorkPtr> works;
        name = group->split(0, 0, soon)->name();
        ++n_named;
        try {
          for (;; ++n_posted) works.push_back(group->recv_object(0, 1));
        } catch (const PeerLostError&) {
        }
        for (const auto& work : works) n_pending += work->done() ? 0 : 1;
      });
    }
    while (n_named < 3 || n_posted < 3) std::this_thread::yield();
    group->abandon(std::make_exception_ptr(PeerLostError("over")), "over");
    group->abandon(std::make_exception_ptr(Error("once more")), "once more");
    for (std::thread& thread : threads) thread.join();
    REQUIRE(n_pending == 0);
    CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size());
    CHECK_THROWS_WITH_AS(group->recv_object(0, 1), "over", PeerLostError);
  }
}
