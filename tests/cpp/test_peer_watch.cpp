#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "core/error.h"
#include "os/peer_watch.h"

using namespace samestep;

namespace {

/// Listens at a free port of this host.
Fd listen_at(std::uint16_t& port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::listen(fd.get(), 16) == 0);
  REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port = ::ntohs(address.sin_port);
  return fd;
}

std::string death(PeerWatch& watch, std::size_t number) {
  const Deadline deadline = Deadline::after(Seconds(30));
  while (!deadline.passed()) {
    watch.ask_after(number);
    if (const std::string why = watch.death(number); !why.empty()) return why;
    std::this_thread::yield();
  }
  return {};
}

}  // namespace

TEST_CASE("peer watch: a port that is closed is a death, one that is open is none, whoever listens") {
  std::vector<PeerWatch::Place> places(4);
  for (PeerWatch::Place& place : places) place.address = "127.0.0.1";
  Fd mine = listen_at(places[0].port), later = listen_at(places[1].port), lives = listen_at(places[2].port);
  (void)listen_at(places[3].port);  // and closed
  places[1].where = "node1 (127.0.0.1:1)";
  places[3].where = "node3 (127.0.0.1:3)";
  PeerWatch watch(std::move(mine), places);
  watch.ask_after(1);
  watch.ask_after(2);
  CHECK(death(watch, 3) == "its process, at node3 (127.0.0.1:3), has ended");
  CHECK(watch.death(1).empty());
  later = Fd();
  CHECK(death(watch, 1) == "its process, at node1 (127.0.0.1:1), has ended");
  CHECK(watch.death(2).empty());
  CHECK(watch.death(0).empty());
}

TEST_CASE("peer watch: a connection that ends while the port stays open is no death") {
  std::vector<PeerWatch::Place> places(3);
  for (PeerWatch::Place& place : places) place.address = "127.0.0.1";
  Fd mine = listen_at(places[0].port), other = listen_at(places[1].port);
  (void)listen_at(places[2].port);
  PeerWatch watch(std::move(mine), places);
  watch.ask_after(1);
  {
    const Fd taken(::accept(other.get(), nullptr, nullptr));
    REQUIRE(taken);
  }
  CHECK_FALSE(death(watch, 2).empty());  // by then it has looked at both, twice at least
  CHECK(watch.death(1).empty());
  other = Fd();
  CHECK_FALSE(death(watch, 1).empty());
}

TEST_CASE("peer watch: a child made by fork does not keep the port open") {
  std::vector<PeerWatch::Place> places(2);
  for (PeerWatch::Place& place : places) place.address = "127.0.0.1";
  Fd other = listen_at(places[1].port);
  pid_t child = 0;
  {
    PeerWatch watched(listen_at(places[0].port), places);
    child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
  }
  PeerWatch watch(std::move(other), places);
  CHECK_FALSE(death(watch, 0).empty());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_CASE("peer watch: what is no address is refused") {
  std::uint16_t port = 0;
  CHECK_THROWS_AS(PeerWatch(listen_at(port), {{"node1", 1, ""}}), InvalidArgumentError);
}
