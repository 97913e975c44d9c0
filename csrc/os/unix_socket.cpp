#include "os/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/wait_hooks.h"

namespace samestep {
namespace {

constexpr std::size_t kLongestPacket = 4096;

Fd make_socket() { return checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "cannot make a socket"); }

/// True once there is something to read, false at the deadline.
bool readable(const Fd& fd, const Deadline& deadline) {
  pollfd entry{fd.get(), POLLIN, 0};
  for (;;) {
    if (::poll(&entry, 1, 0) > 0) return true;
    if (deadline.passed()) return false;
    wait_hooks().interrupt();
    if (::poll(&entry, 1, 20) > 0) return true;
  }
}

}  // namespace

void UnixSocket::send(const void* data, std::size_t nbytes, const Fd* fd) {
  iovec part{const_cast<void*>(data), nbytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = fd->get();
    std::memcpy(CMSG_DATA(header), &number, sizeof number);
  }
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) throw PeerLostError("the process at the other end has ended");
    throw_errno("cannot send to a process of this host");
  }
}

std::optional<UnixSocket::Packet> UnixSocket::receive(const Deadline& deadline) {
  if (!readable(fd_, deadline)) return std::nullopt;
  Packet packet;
  packet.bytes.resize(kLongestPacket);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
  // An end that had not read all is told once, before what it has sent itself.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && errno != ECONNRESET) throw_errno("cannot receive from a process of this host");
  if (got <= 0) throw PeerLostError("the process at the other end has ended");
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw UnavailableError("no descriptor is left for memory that a process of this host shares; raise `ulimit -n`");
  }
  packet.bytes.resize(static_cast<std::size_t>(got));
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&message); header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int number;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    packet.fd = Fd(number);
  }
  return packet;
}

pid_t UnixSocket::peer() const {
  ucred who{};
  socklen_t size = sizeof who;
  return ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
}

bool UnixSocket::at_end() const {
  pollfd entry{fd_.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

UnixListener::UnixListener() : fd_(make_socket()) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // No name given: the kernel picks one in the abstract namespace, which no file stands for.
  if (::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) throw_errno("cannot bind");
  if (::listen(fd_.get(), SOMAXCONN) != 0) throw_errno("cannot listen");
  socklen_t size = sizeof address;
  if (::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) throw_errno("cannot get the name");
  name_.assign(address.sun_path + 1, size - sizeof(sa_family_t) - 1);
}

std::optional<UnixSocket> UnixListener::accept(const Deadline& deadline) {
  if (!readable(fd_, deadline)) return std::nullopt;
  return UnixSocket(checked(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC), "cannot accept"));
}

UnixSocket connect_to(const std::string& name) {
  Fd fd = make_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  const auto size = static_cast<socklen_t>(sizeof(sa_family_t) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    throw_errno("cannot connect to a process of this host");
  }
  return UnixSocket(std::move(fd));
}

}  // namespace samestep
