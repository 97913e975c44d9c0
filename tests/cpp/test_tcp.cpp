#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "collective_calls.h"
#include "core/error.h"
#include "local_network.h"
#include "loopback.h"
#include "tcp/frame.h"
#include "transport/tags.h"

using namespace samestep;

namespace {

using Message = std::vector<unsigned char>;

/// What a rank sends under a tag.
Message message(int rank, int tag, std::size_t nbytes) {
  Message bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) {
    bytes[i] = static_cast<unsigned char>((i * 31 + i / 251) ^ static_cast<std::size_t>(rank * 7 + tag));
  }
  return bytes;
}

void finish(Transport& transport, Transport::Request& request, Transport::Envelope* from = nullptr) {
  const Deadline deadline = Deadline::after(Seconds(60));
  while (!transport.test(request, from)) {
    REQUIRE(!deadline.passed());
    std::this_thread::yield();
  }
}

std::string loss(Transport& transport, int peer) {
  const Deadline deadline = Deadline::after(Seconds(60));
  while (!deadline.passed()) {
    Transport::Envelope from;
    transport.probe(tags::kLeaveNotice, from);
    for (const Transport::PeerFailure& found : transport.failed_peers()) {
      if (found.peer == peer) return found.text;
    }
    std::this_thread::yield();
  }
  return {};
}

/// Each rank as a thread with its transport, without and with encryption.
template <class Body>
void with_messengers(int size, Body body) {
  for (const bool encrypted : {false, true}) {
    auto ranks = connected_ranks(size, encrypted);
    as_threads(size, [&](int rank) {
      const auto transport = make_tcp_transport(rank, std::move(ranks[static_cast<std::size_t>(rank)]));
      body(*transport);
      transport->close();
    });
  }
}

constexpr std::size_t kInStage = 32 << 10;
constexpr std::size_t kAwkward[] = {0,
                                    1,
                                    2,
                                    31,
                                    kInStage - sizeof(tcp::Frame) - 9,
                                    kInStage - sizeof(tcp::Frame) - 8,
                                    kInStage - sizeof(tcp::Frame) - 4,
                                    kInStage - sizeof(tcp::Frame),
                                    kInStage,
                                    kInStage + 1,
                                    tcp::kEagerLimit,
                                    tcp::kEagerLimit + 1,
                                    tcp::kDataFrameBytes + 1,
                                    3 * tcp::kDataFrameBytes,
                                    10'000'000};

}  // namespace

TEST_CASE("tcp: messages of awkward sizes, receives posted before and after") {
  with_messengers(3, [](Transport& me) {
    for (const bool early : {true, false}) {
      int tag = early ? 100 : 200;
      for (const std::size_t nbytes : kAwkward) {
        ++tag;
        const Message mine = message(me.rank(), tag, nbytes);
        std::vector<Message> got(3, Message(nbytes + 1, 0xee));
        std::vector<Transport::Request> receives(3), sends(3);
        const auto post = [&] {
          for (int peer = 0; peer < 3; ++peer) {
            const auto i = static_cast<std::size_t>(peer);
            receives[i] = me.receive(got[i].data(), nbytes, peer, tag);
          }
        };
        if (early) post();
        for (int peer = 0; peer < 3; ++peer) {
          sends[static_cast<std::size_t>(peer)] = me.send(mine.data(), nbytes, peer, tag);
        }
        if (!early) {
          Transport::Envelope from;
          for (int i = 0; i < 100; ++i) me.probe(0, from);  // let them arrive
          post();
        }
        for (int peer = 0; peer < 3; ++peer) {
          const auto i = static_cast<std::size_t>(peer);
          Transport::Envelope from;
          finish(me, receives[i], &from);
          finish(me, sends[i]);
          Message expected = message(peer, tag, nbytes);
          expected.push_back(0xee);
          REQUIRE(got[i] == expected);
          REQUIRE(from.source == peer);
          REQUIRE(from.tag == tag);
        }
      }
    }
  });
}

TEST_CASE("tcp: many tags and sizes in one go arrive in order, however they are received") {
  constexpr int kTags = 40, kRounds = 8;
  const auto nbytes = [](int tag, int round) {
    return static_cast<std::size_t>(tag * tag * 97 + round * 13'001) % 90'000;
  };
  with_messengers(2, [&](Transport& me) {
    const int peer = 1 - me.rank();
    std::vector<Message> sent;
    std::vector<Transport::Request> sends;
    for (int round = 0; round < kRounds; ++round) {
      for (int tag = 0; tag < kTags; ++tag) {
        sent.push_back(message(me.rank() + round, tag, nbytes(tag, round)));
        sends.push_back(me.send(sent.back().data(), sent.back().size(), peer, tag));
      }
    }
    for (int tag = kTags - 1; tag >= 0; --tag) {
      for (int round = 0; round < kRounds; ++round) {
        Message got(nbytes(tag, round));
        const int source = round % 2 == 0 ? peer : kAnySource;
        Transport::Request request = me.receive(got.data(), got.size(), source, tag);
        finish(me, request);
        REQUIRE(got == message(peer + round, tag, nbytes(tag, round)));
      }
    }
    for (Transport::Request& send : sends) finish(me, send);
  });
}

TEST_CASE("tcp: both sides send 50 MB before they receive, and short messages overtake them") {
  constexpr std::size_t kLong = 50'000'000;
  with_messengers(2, [](Transport& me) {
    const int peer = 1 - me.rank();
    const Message mine = message(me.rank(), 1, kLong), short_one = message(me.rank(), 2, 8);
    Transport::Request body = me.send(mine.data(), kLong, peer, 1);
    Transport::Request note = me.send(short_one.data(), 8, peer, 2);
    Message got(8);
    Transport::Request receive = me.receive(got.data(), 8, peer, 2);
    finish(me, receive);
    REQUIRE(got == message(peer, 2, 8));
    got.resize(kLong);
    receive = me.receive(got.data(), kLong, peer, 1);
    finish(me, receive);
    REQUIRE(got == message(peer, 1, kLong));
    finish(me, body);
    finish(me, note);
  });
}

TEST_CASE("tcp: backpressure of short messages") {
  constexpr std::size_t kEach = 64 << 10, kMessages = 800;
  with_messengers(2, [](Transport& me) {
    const int peer = 1 - me.rank();
    const Message mine = message(me.rank(), 3, kEach);
    std::vector<Transport::Request> sends(kMessages);
    for (auto& send : sends) send = me.send(mine.data(), kEach, peer, 3);
    for (auto& send : sends) finish(me, send);
    Message got(kEach);
    for (std::size_t i = 0; i < kMessages; ++i) {
      Transport::Request receive = me.receive(got.data(), kEach, peer, 3);
      finish(me, receive);
      REQUIRE(got == message(peer, 3, kEach));
    }
  });
}

TEST_CASE("tcp: a message that does not fit is an error in its receiver, and the next one arrives") {
  with_messengers(2, [](Transport& me) {
    for (const std::size_t nbytes : {std::size_t{100}, tcp::kEagerLimit + 1}) {
      for (const bool early : {true, false}) {
        const Message mine = message(me.rank(), 1, nbytes);
        Message got(nbytes, 0xee);
        Transport::Request send, receive;
        if (early) receive = me.receive(got.data(), 10, 1 - me.rank(), 1);
        send = me.send(mine.data(), nbytes, 1 - me.rank(), 1);
        Transport::Envelope from;
        for (int i = 0; i < 100 && !early; ++i) me.probe(0, from);
        if (!early) receive = me.receive(got.data(), 10, 1 - me.rank(), 1);
        CHECK_THROWS_AS(finish(me, receive), Error);
        CHECK(got == Message(nbytes, 0xee));
        receive = me.receive(got.data(), nbytes, 1 - me.rank(), 2);
        Transport::Request second = me.send(mine.data(), nbytes, 1 - me.rank(), 2);
        finish(me, receive);
        finish(me, second);
        finish(me, send);
        CHECK(got == message(1 - me.rank(), 1, nbytes));
      }
    }
  });
}

TEST_CASE("tcp: a receive that is given up is written no more, in the middle of its message too") {
  for (const std::size_t nbytes : {std::size_t{1000}, tcp::kEagerLimit, std::size_t{20'000'000}}) {
    const Message sent(nbytes);  // longer-lived than the transports, because it may never be wanted
    with_messengers(2, [&](Transport& me) {
      const int peer = 1 - me.rank();
      auto got = std::make_unique<Message>(nbytes);
      Transport::Request receive = me.receive(got->data(), nbytes, peer, 1);
      Transport::Request send = me.send(sent.data(), nbytes, peer, 1);
      Transport::Envelope from;
      me.probe(0, from);
      const bool cancelled = me.cancel(receive);
      if (cancelled) {
        got.reset();
      } else {
        finish(me, receive);
      }
      Message after(3);
      receive = me.receive(after.data(), 3, peer, 2);
      Transport::Request second = me.send(sent.data(), 3, peer, 2);
      finish(me, receive);
      finish(me, second);
      if (nbytes <= tcp::kEagerLimit) finish(me, send);
    });
  }
}

TEST_CASE("tcp: groups share the connections, and a message for a group may arrive before the group is made") {
  with_messengers(3, [](Transport& me) {
    const std::vector<int> turned{2, 0, 1}, pair{2, 0};
    for (int round = 0; round < 3; ++round) {
      const auto all = me.subset(turned, 0);
      REQUIRE(all->rank() == (me.rank() + 1) % 3);
      const auto two = me.rank() == 1 ? nullptr : me.subset(pair, 0);
      for (Transport* group : {all.get(), two.get()}) {
        if (group == nullptr) continue;
        const int next = (group->rank() + 1) % group->size();
        const int before = (group->rank() + group->size() - 1) % group->size();
        const int tag = group->size();
        const Message mine = message(group->rank(), tag, 5000);
        Message got(5000);
        Transport::Request send = group->send(mine.data(), 5000, next, 9);
        Transport::Request receive = group->receive(got.data(), 5000, kAnySource, 9);
        Transport::Envelope from;
        finish(*group, receive, &from);
        finish(*group, send);
        REQUIRE(from.source == before);
        REQUIRE(got == message(before, tag, 5000));
      }
      if (two) two->close();
      all->close();
    }
  });
}

TEST_CASE("tcp: a peer that dies in the middle of a message is lost, and what it sent before is not") {
  for (const std::size_t nbytes : {tcp::kEagerLimit, std::size_t{50'000'000}}) {
    auto ranks = connected_ranks(3);
    std::atomic<bool> started{false};
    as_threads(3, [&](int rank) {
      auto me = make_tcp_transport(rank, std::move(ranks[static_cast<std::size_t>(rank)]));
      if (rank == 1) {
        const Message body(nbytes), word = message(1, 4, 10);
        for (int peer : {0, 2}) {
          Transport::Request first = me->send(word.data(), 10, peer, 4);
          finish(*me, first);
          me->send(body.data(), nbytes, peer, 5);
        }
        Transport::Envelope from;
        while (!started) me->probe(0, from);
        return;
      }
      Message got(nbytes), word(10);
      Transport::Request receive = me->receive(got.data(), nbytes, 1, 5);
      if (rank == 0) {
        for (int i = 0; i < 1000; ++i) me->test(receive, nullptr);
        started = true;
      }
      if (nbytes > tcp::kEagerLimit || !receive.active) {
        CHECK(loss(*me, 1).find("from host1, has ended") != std::string::npos);
      } else {
        loss(*me, 1);
      }
      Transport::Request before = me->receive(word.data(), 10, 1, 4);
      finish(*me, before);
      CHECK(word == message(1, 4, 10));
      CHECK(me->failed_peers().empty());  // reported once
      Transport::Request other = me->send(word.data(), 10, 2 - rank, 6);
      Transport::Request from_other = me->receive(word.data(), 10, 2 - rank, 6);
      finish(*me, other);
      finish(*me, from_other);
      me->close();
    });
  }
}

TEST_CASE("tcp: a peer that has closed the group is not lost to it") {
  auto ranks = connected_ranks(3);
  std::atomic<int> closed{0};
  as_threads(3, [&](int rank) {
    auto me = make_tcp_transport(rank, std::move(ranks[static_cast<std::size_t>(rank)]));
    if (rank != 0) {
      me->close();  // waits a little for rank 0, in vain
      me.reset();
      ++closed;
      return;
    }
    while (closed != 2) CHECK(me->failed_peers().empty());
    Transport::Envelope from;
    me->probe(0, from);
    CHECK(me->failed_peers().empty());
    me->close();
  });
}

TEST_CASE("tcp: what is pending when a group is closed never ends, and accesses no memory") {
  std::barrier closed(2);
  with_messengers(2, [&](Transport& me) {
    const std::vector<int> both{0, 1};
    const auto group = me.subset(both, 0);
    const int peer = 1 - me.rank();
    auto sent = std::make_unique<Message>(tcp::kEagerLimit), got = std::make_unique<Message>(100);
    Transport::Request send;
    for (int i = 0; i < 100; ++i)
      send = group->send(sent->data(), sent->size(), peer, 1);  // more than the kernel takes
    group->send(sent->data(), sent->size(), peer, 1);
    auto offered = std::make_unique<Message>(5 * tcp::kDataFrameBytes);
    group->send(offered->data(), offered->size(), peer, 1);
    Transport::Request receive = group->receive(got->data(), got->size(), peer, 2);
    group->close();
    sent.reset();
    got.reset();
    offered.reset();
    closed.arrive_and_wait();  // a rank that reads now would make room for what the other one still sends
    for (int i = 0; i < 100; ++i) {
      CHECK(!group->test(send));
      CHECK(!group->test(receive));
    }
    CHECK(group->cancel(receive));
    Message word(8), answer(8);
    Transport::Request out = me.send(word.data(), 8, peer, 3), in = me.receive(answer.data(), 8, peer, 3);
    finish(me, in);
    finish(me, out);
  });
}

TEST_CASE("tcp: an empty message that waits behind others outlives its group") {
  with_messengers(2, [](Transport& me) {
    const std::vector<int> both{0, 1};
    const int peer = 1 - me.rank();
    auto group = me.subset(both, 0);
    const Message body(tcp::kEagerLimit);
    for (int i = 0; i < 100; ++i) me.send(body.data(), body.size(), peer, 1);  // more than the kernel takes
    group->send(nullptr, 0, peer, 2);
    group->close();
    group.reset();
    Message got(body.size());
    for (int i = 0; i < 100; ++i) {
      Transport::Request receive = me.receive(got.data(), got.size(), peer, 1);
      finish(me, receive);
    }
    Message word(8), answer(8);
    Transport::Request out = me.send(word.data(), 8, peer, 3), in = me.receive(answer.data(), 8, peer, 3);
    finish(me, in);
    finish(me, out);
  });
}

TEST_CASE("tcp: bytes that no rank sends end the connection, not the process") {
  auto [ours, theirs] = connected_pair();
  std::vector<TcpPeer> peers(2);
  peers[1] = {std::move(ours), "host1"};
  const auto me = make_tcp_transport(0, std::move(peers));
  const std::string garbage =
      "GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n and more than a frame of it, so that it is read";
  REQUIRE(::write(theirs.get(), garbage.data(), garbage.size()) == static_cast<ssize_t>(garbage.size()));
  ::shutdown(theirs.get(), SHUT_WR);
  CHECK(loss(*me, 1).find("were changed on the way") != std::string::npos);
}

TEST_CASE("tcp: every flipped bit of a message is an error of its receiver that names both ranks") {
  const Message sent = message(1, 4, 8);
  for (const std::string& key : {std::string(), std::string(32, 'k')}) {
    const std::size_t tag = key.empty() ? sizeof(std::uint32_t) : 16;
    auto [theirs, wire] = connected_pair();
    std::vector<TcpPeer> peers(2);
    peers[1].where = "host1";
    peers[0] = {std::move(theirs), "host0", key, key};
    auto sender = make_tcp_transport(1, std::move(peers));
    sender->send(sent.data(), sent.size(), 0, 4);
    Message bytes(200);
    bytes.resize(static_cast<std::size_t>(::read(wire.get(), bytes.data(), bytes.size())));
    REQUIRE(bytes.size() == sizeof(tcp::Frame) + sent.size() + 2 * tag);
    const bool readable = std::search(bytes.begin(), bytes.end(), sent.begin(), sent.end()) != bytes.end();
    CHECK(readable == key.empty());
    for (std::size_t bit = 0; bit <= 8 * bytes.size(); ++bit) {
      auto [ours, proxy] = connected_pair();
      std::vector<TcpPeer> ends(2);
      ends[0].where = "host0";
      ends[1] = {std::move(ours), "host1", key, key};
      const auto me = make_tcp_transport(0, std::move(ends));
      Message got(8), changed = bytes;
      Transport::Request receive = me->receive(got.data(), got.size(), kAnySource, 4);
      const bool intact = bit == 8 * bytes.size();
      if (!intact) changed[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
      REQUIRE(::write(proxy.get(), changed.data(), changed.size()) == static_cast<ssize_t>(changed.size()));
      if (intact) {
        finish(*me, receive);
        REQUIRE(got == sent);
        continue;
      }
      ::shutdown(proxy.get(), SHUT_WR);
      REQUIRE(loss(*me, 1).find("bytes from rank 1 to rank 0 at host0 were changed on the way") != std::string::npos);
      REQUIRE(!me->test(receive));
      REQUIRE(me->cancel(receive));
      Message answer(sizeof(tcp::Frame) + tag);  // tells the sender
      REQUIRE(::recv(proxy.get(), answer.data(), answer.size(), MSG_WAITALL) == static_cast<ssize_t>(answer.size()));
      if (bit > 0) continue;
      REQUIRE(::write(wire.get(), answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()));
      CHECK(loss(*sender, 0).find("bytes from rank 1 at host1 to rank 0 were changed on the way") != std::string::npos);
    }
  }
}

TEST_CASE("tcp: a sender learns that its bytes were changed, whatever else is on the way") {
  for (const std::string& key : {std::string(), std::string(32, 'k')}) {
    auto [theirs, wire] = connected_pair();
    auto [ours, proxy] = connected_pair();
    std::vector<TcpPeer> peers(2), ends(2);
    peers[0] = {std::move(theirs), "host0", key, key};
    ends[1] = {std::move(ours), "host1", key, key};
    peers[1].where = "host1";
    auto sender = make_tcp_transport(1, std::move(peers));
    auto me = make_tcp_transport(0, std::move(ends));
    const Message body(tcp::kEagerLimit);
    for (int i = 0; i < 100; ++i) me->send(body.data(), body.size(), 1, 1);  // more than the kernel takes
    sender->send(body.data(), 8, 0, 1);
    Message changed(1000);  // the rest of it stays unread
    REQUIRE(::read(wire.get(), changed.data(), changed.size()) > 0);
    changed[0] ^= 1;
    REQUIRE(::write(proxy.get(), changed.data(), changed.size()) == static_cast<ssize_t>(changed.size()));
    std::string text;
    std::thread mine([&] {
      text = loss(*me, 1);
      me.reset();
    });
    Message bytes, more(1 << 16);
    ssize_t n = 0;
    while ((n = ::read(proxy.get(), more.data(), more.size())) > 0)
      bytes.insert(bytes.end(), more.begin(), more.begin() + n);
    CHECK(n == 0);  // it has not been reset
    ::shutdown(proxy.get(), SHUT_WR);
    mine.join();
    CHECK(text.find("were changed on the way") != std::string::npos);
    std::thread passing(
        [&] { CHECK(::write(wire.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())); });
    CHECK(loss(*sender, 0).find("bytes from rank 1 at host1 to rank 0 were changed on the way") != std::string::npos);
    passing.join();
  }
}

TEST_CASE("tcp: an encrypted message is not accepted twice, nor in another order") {
  const std::string key(32, 'k');
  auto [theirs, wire] = connected_pair();
  std::vector<TcpPeer> peers(2);
  peers[0] = {std::move(theirs), "host0", key, key};
  auto sender = make_tcp_transport(1, std::move(peers));
  const Message sent = message(1, 4, 8);
  constexpr std::size_t kEach = sizeof(tcp::Frame) + 8 + 32;
  for (int i = 0; i < 2; ++i) sender->send(sent.data(), sent.size(), 0, 4);
  Message bytes(2 * kEach);
  REQUIRE(::recv(wire.get(), bytes.data(), bytes.size(), MSG_WAITALL) == static_cast<ssize_t>(bytes.size()));
  for (const std::size_t first : {std::size_t{0}, kEach}) {
    auto [ours, proxy] = connected_pair();
    std::vector<TcpPeer> ends(2);
    ends[1] = {std::move(ours), "host1", key, key};
    const auto me = make_tcp_transport(0, std::move(ends));
    for (int i = 0; i < 2; ++i) REQUIRE(::write(proxy.get(), bytes.data() + first, kEach) == kEach);
    ::shutdown(proxy.get(), SHUT_WR);
    CHECK(loss(*me, 1).find("were changed on the way") != std::string::npos);
    Transport::Envelope from;
    CHECK(me->probe(4, from) == (first == 0));  // what came first was right
  }
}

TEST_CASE("tcp: arrays may change after the failure of the operations that send them") {
  for (const std::size_t nbytes : {tcp::kEagerLimit, std::size_t{20'000'000}}) {
    std::barrier changed(2);
    with_messengers(2, [&](Transport& me) {
      const std::vector<int> both{0, 1};
      const int peer = 1 - me.rank();
      const auto group = me.subset(both, 0);
      const std::size_t n = nbytes == tcp::kEagerLimit ? 60 : 1;  // more than the kernel takes
      Message body(nbytes), got(nbytes);
      std::vector<Transport::Request> sends(n);
      for (auto& send : sends) send = group->send(body.data(), nbytes, peer, 1);
      Transport::Request receive = group->receive(got.data(), nbytes, peer, 1);
      Transport::Envelope from;
      for (int i = 0; i < 10; ++i) me.probe(0, from);
      group->detach_sends();
      body.assign(nbytes, 1);
      changed.arrive_and_wait();
      for (std::size_t i = 0; i < n; ++i) {
        if (i > 0) receive = group->receive(got.data(), nbytes, peer, 1);
        finish(*group, receive);
      }
      for (auto& send : sends) finish(*group, send);
      Message word(8), answer(8);
      Transport::Request out = me.send(word.data(), 8, peer, 3), in = me.receive(answer.data(), 8, peer, 3);
      finish(me, in);
      finish(me, out);
      CHECK(me.failed_peers().empty());
      group->close();
    });
  }
}

TEST_CASE("tcp: a child made by fork does not keep the connection open") {
  auto [ours, theirs] = connected_pair();
  std::vector<TcpPeer> peers(2);
  peers[1] = {std::move(ours), "host1"};
  auto me = make_tcp_transport(0, std::move(peers));
  int alive[2];
  REQUIRE(::pipe(alive) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(alive[1]);
    char byte;
    (void)!::read(alive[0], &byte, 1);
    ::_exit(0);
  }
  std::vector<TcpPeer> other(2);
  other[0] = {std::move(theirs), "host0"};
  const auto peer = make_tcp_transport(1, std::move(other));
  me.reset();  // as a killed process
  CHECK(loss(*peer, 0).find("has ended") != std::string::npos);
  ::close(alive[1]);
  ::close(alive[0]);
  ::waitpid(child, nullptr, 0);
}

TEST_CASE("tcp: every verb gives the same as in theory, on 1 to 4 ranks") {
  for (const int size : {2, 3, 4}) {
    auto ranks = connected_ranks(size);
    as_threads(size, [&](int rank) {
      ExchangeOptions options;
      options.oversubscribed = true;
      const auto world = open_tcp_world(rank, std::move(ranks[static_cast<std::size_t>(rank)]), options);
      const Deadline soon = Deadline::after(Seconds(60));
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{5000}, std::size_t{1'000'003}}) {
        std::vector<float> values(count), expected(count);
        for (std::size_t i = 0; i < count; ++i) {
          values[i] = static_cast<float>(i % 17) + static_cast<float>(rank);
          for (int r = 0; r < size; ++r) expected[i] += static_cast<float>(i % 17) + static_cast<float>(r);
        }
        const Buffer buffer{values.data(), count, DType::float32};
        allreduce(*world, buffer, buffer, {}, Shape::flat(count))->wait(soon);
        REQUIRE(values == expected);
        bcast(*world, buffer, size - 1, Shape::flat(count))->wait(soon);
        const auto pair = world->split(rank % 2, 0, soon);
        if (pair->size() > 1) bcast(*pair, buffer, 0, Shape::flat(count))->wait(soon);
        pair->close(soon);
        REQUIRE(values == expected);
      }
      world->close(soon);
    });
  }
}
