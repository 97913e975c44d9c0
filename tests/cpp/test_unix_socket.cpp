#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "core/error.h"
#include "os/unix_socket.h"

using samestep::Deadline;
using samestep::Seconds;
using samestep::UnixSocket;

namespace {

std::pair<UnixSocket, UnixSocket> connected() {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  return {UnixSocket(samestep::Fd(ends[0])), UnixSocket(samestep::Fd(ends[1]))};
}

std::size_t n_descriptors() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

/// Sends a packet with copies of descriptor 0.
void send_with_fds(const UnixSocket& socket, std::size_t n) {
  char byte = 1;
  iovec part{&byte, 1};
  std::vector<char> control(CMSG_SPACE(n * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(n * sizeof(int));
  std::memset(CMSG_DATA(header), 0, n * sizeof(int));
  REQUIRE(::sendmsg(socket.fd().get(), &message, 0) == 1);
}

}  // namespace

TEST_CASE("unix socket: what was sent arrives, though its sender has gone without reading all") {
  auto [one, other] = connected();
  const int sent = 7, unread = 8;
  REQUIRE(one.send_now(&sent, sizeof sent));
  REQUIRE(other.send_now(&unread, sizeof unread));
  one = UnixSocket();
  const auto packet = other.receive_now();
  REQUIRE(packet);
  REQUIRE(packet->bytes.size() == sizeof sent);
  int got = 0;
  std::memcpy(&got, packet->bytes.data(), sizeof got);
  CHECK(got == sent);
  CHECK_THROWS_AS(other.receive_now(), samestep::PeerLostError);
}

TEST_CASE("unix socket: a descriptor for which there is no room here is reported as such") {
  auto [one, other] = connected();
  const int sent = 7;
  {
    const samestep::Fd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    REQUIRE(one.send_now(&sent, sizeof sent, &file));
  }
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{3, before.rlim_max};  // what is in use; poll takes no more than that at once
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK_THROWS_AS(other.receive_now(), samestep::UnavailableError);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("unix socket: descriptors that are too many are closed, and only their sender gets an error") {
  auto [one, other] = connected();
  const std::size_t before = n_descriptors();
  for (const std::size_t n : {2, 3, 253}) {
    send_with_fds(one, n);
    CHECK_THROWS_AS(other.receive_now(), samestep::Error);
    CHECK(n_descriptors() == before);
  }
  send_with_fds(one, 1);
  CHECK(other.receive_now()->fd);
  CHECK(n_descriptors() == before);
}

TEST_CASE("unix socket: a process that reads nothing holds up its peer until the deadline at most") {
  const auto [one, other] = connected();
  const int word = 7;
  while (one.send_now(&word, sizeof word)) {
  }
  REQUIRE(!one.send(&word, sizeof word, nullptr, Deadline::after(Seconds(0.05))));
}
