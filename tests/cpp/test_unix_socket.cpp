#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <cstring>

#include "core/error.h"
#include "os/unix_socket.h"

using samestep::Deadline;
using samestep::Seconds;
using samestep::UnixListener;
using samestep::UnixSocket;

TEST_CASE("unix socket: what was sent arrives, though its sender has gone without reading all") {
  UnixListener listener;
  UnixSocket one = samestep::connect_to(listener.name());
  auto other = listener.accept(Deadline::after(Seconds(10)));
  REQUIRE(other);
  const int sent = 7, unread = 8;
  one.send(&sent, sizeof sent);
  other->send(&unread, sizeof unread);
  one = UnixSocket();
  const auto packet = other->receive(Deadline::after(Seconds(10)));
  REQUIRE(packet);
  REQUIRE(packet->bytes.size() == sizeof sent);
  int got = 0;
  std::memcpy(&got, packet->bytes.data(), sizeof got);
  CHECK(got == sent);
  CHECK_THROWS_AS(other->receive(Deadline::after(Seconds(10))), samestep::PeerLostError);
}

TEST_CASE("unix socket: a descriptor for which there is no room here is told as such") {
  UnixListener listener;
  UnixSocket one = samestep::connect_to(listener.name());
  auto other = listener.accept(Deadline::after(Seconds(10)));
  REQUIRE(other);
  const int sent = 7;
  {
    const samestep::Fd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    one.send(&sent, sizeof sent, &file);
  }
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{3, before.rlim_max};  // what is in use; poll takes no more than that at once
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK_THROWS_AS(other->receive(Deadline::after(Seconds(10))), samestep::UnavailableError);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}
