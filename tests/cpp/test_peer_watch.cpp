#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "core/error.h"
#include "local_ports.h"
#include "os/peer_watch.h"

using namespace samestep;

namespace {

/// The two ports of one process.
struct Ports {
  explicit Ports(PeerWatch::Place& place, int backlog = 16, bool host_answers = true) {
    place.address = "127.0.0.1";
    place.where = "node1 (127.0.0.1:1)";
    listener = open_port(place.port, backlog);
    reserved = open_port(place.reserved_port, host_answers ? -1 : 0);
    if (!host_answers) fill(place.reserved_port, strangers);
    port = place.port;
  }
  /// Connects until the kernel no longer answers.
  static void fill(std::uint16_t port, std::vector<Fd>& strangers) {
    pollfd made{};
    do {
      strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const sockaddr_in address = loopback(port);
      ::connect(strangers.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
      made = {strangers.back().get(), POLLOUT, 0};
    } while (::poll(&made, 1, 100) == 1);
  }
  void fill_queue() { fill(port, strangers); }

  Fd listener, reserved;
  std::uint16_t port = 0;
  std::vector<Fd> strangers = {};
};

const PeerWatch::Times kQuick{.silence = Seconds(0.6), .retry = Seconds(0.1), .report_delay = Seconds(0.05)};

std::string death(PeerWatch& watch, std::size_t number, Seconds patience = Seconds(30)) {
  const Deadline deadline = Deadline::after(patience);
  while (!deadline.passed()) {
    watch.watch(number);
    if (const std::string why = watch.death(number); !why.empty()) return why;
    std::this_thread::yield();
  }
  return {};
}

/// The next connection of a watch, which connects only while somebody asks it.
Fd accepted(PeerWatch& watch, std::size_t number, const Fd& listener) {
  pollfd come{listener.get(), POLLIN, 0};
  for (const Deadline deadline = Deadline::after(Seconds(30)); ::poll(&come, 1, 0) == 0;) {
    REQUIRE(!deadline.passed());
    REQUIRE(watch.death(number).empty());
    std::this_thread::yield();
  }
  return Fd(::accept(listener.get(), nullptr, nullptr));
}

const std::string kEnded = "its process, at node1 (127.0.0.1:1), has ended";

}  // namespace

TEST_CASE("peer watch: a port that is closed is a death, one that is open is none, by any listener") {
  std::vector<PeerWatch::Place> places(4);
  Ports mine(places[0]), later(places[1]), lives(places[2]);
  (void)Ports(places[3]);  // and closed
  PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
  watch.watch(1);
  watch.watch(2);
  CHECK(death(watch, 3) == kEnded);
  CHECK(watch.death(1).empty());
  later.listener = Fd();
  CHECK(death(watch, 1) == kEnded);
  CHECK(watch.death(2).empty());
  CHECK(watch.death(0).empty());
}

TEST_CASE("peer watch: a connection that ends while the port stays open is no death") {
  std::vector<PeerWatch::Place> places(3);
  Ports mine(places[0]), other(places[1]);
  (void)Ports(places[2]);
  PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
  watch.watch(1);
  for (const bool resets : {false, true}) {
    Fd taken = accepted(watch, 1, other.listener);
    REQUIRE(taken);
    const linger reset_on_close{1, 0};
    if (resets) REQUIRE(::setsockopt(taken.get(), SOL_SOCKET, SO_LINGER, &reset_on_close, sizeof reset_on_close) == 0);
    taken = Fd();
    CHECK(death(watch, 1, Seconds(0.5)).empty());  // and connects again
  }
  CHECK(death(watch, 2) == kEnded);  // by then it has looked at both, several times
  CHECK(watch.death(1).empty());
  other.listener = Fd();
  CHECK(death(watch, 1) == kEnded);
}

TEST_CASE("peer watch: one refusal is no death") {
  std::vector<PeerWatch::Place> places(2);
  Ports mine(places[0]), other(places[1]);
  PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
  other.listener = Fd();
  watch.watch(1);  // is refused
  Fd again(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(other.port);
  REQUIRE(::bind(again.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(again.get(), 16) == 0);
  CHECK(death(watch, 1, Seconds(1)).empty());
}

TEST_CASE("peer watch: a full queue is no death, before and after the watch begins, and does not hide one") {
  for (const bool is_watched_before : {false, true}) {
    std::vector<PeerWatch::Place> places(2);
    Ports mine(places[0]), other(places[1], /*backlog=*/0);
    PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
    if (is_watched_before) CHECK(death(watch, 1, Seconds(0.1)).empty());
    other.fill_queue();
    CHECK(death(watch, 1, 3 * kQuick.silence).empty());
    other.listener = Fd();
    CHECK(death(watch, 1) == kEnded);
  }
}

TEST_CASE("peer watch: a host that answers at neither port is down") {
  std::vector<PeerWatch::Place> places(2);
  Ports mine(places[0]), other(places[1], /*backlog=*/0, /*host_answers=*/false);
  other.fill_queue();
  PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
  CHECK(death(watch, 1) == "its host does not answer at node1 (127.0.0.1:1): Connection timed out");
}

TEST_CASE("peer watch: time in which nobody looked is no silence") {
  std::vector<PeerWatch::Place> places(2);
  Ports mine(places[0]), other(places[1], /*backlog=*/0);
  other.fill_queue();
  PeerWatch watch(std::move(mine.listener), std::move(mine.reserved), places, kQuick);
  CHECK(death(watch, 1, Seconds(0.1)).empty());
  std::this_thread::sleep_for(Seconds(1.2));  // this rank computes: longer than a gap, and than the silence of a host
  CHECK(death(watch, 1, Seconds(0.3)).empty());
}

TEST_CASE("peer watch: a child made by fork does not keep the port open") {
  std::vector<PeerWatch::Place> places(2);
  Ports first(places[0]), other(places[1]);
  pid_t child = 0;
  {
    PeerWatch watched(std::move(first.listener), std::move(first.reserved), places);
    child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
  }
  PeerWatch watch(std::move(other.listener), std::move(other.reserved), places);
  CHECK_FALSE(death(watch, 0).empty());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_CASE("peer watch: what is no address is refused") {
  std::uint16_t port = 0;
  CHECK_THROWS_AS(PeerWatch(open_port(port), Fd(), {{"node1", 1, 2, ""}}), InvalidArgumentError);
}
