#include "os/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "process/wait_hooks.h"

namespace samestep {
namespace {

constexpr std::size_t kLongestPacket = 4096;
constexpr int kPauseMs = 20;

/// The descriptor that came with a message, if one did.
Fd take_fd(msghdr& message) {
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return {};
  int number;
  std::memcpy(&number, CMSG_DATA(header), sizeof number);
  return Fd(number);
}

}  // namespace

bool UnixSocket::send_now(const void* data, std::size_t nbytes, const Fd* fd) const {
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
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return false;
    if (errno == EPIPE || errno == ECONNRESET) throw PeerLostError("the process at the other end has ended");
    throw_errno("cannot send to a process of this host");
  }
  return true;
}

bool UnixSocket::send(const void* data, std::size_t nbytes, const Fd* fd, const Deadline& deadline) const {
  while (!send_now(data, nbytes, fd)) {
    if (deadline.passed()) return false;
    wait_for(POLLOUT);
  }
  return true;
}

void UnixSocket::wait_until_readable() const { wait_for(POLLIN); }

void UnixSocket::wait_for(short events) const {
  wait_hooks().interrupt();
  pollfd entry{fd_.get(), events, 0};
  ::poll(&entry, 1, kPauseMs);
}

std::optional<UnixSocket::Packet> UnixSocket::receive_now() {
  Packet packet;
  packet.bytes.resize(kLongestPacket);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Ranks send one descriptor in a packet at most, so the kernel cuts off only what this process has no descriptor for.
  alignas(cmsghdr) char control[CMSG_LEN(sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  // ECONNRESET is reported once, before the data that the peer has sent, if the peer had not read everything.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (got < 0 && errno != ECONNRESET) throw_errno("cannot receive from a process of this host");
  if (got <= 0) throw PeerLostError("the process at the other end has ended");
  packet.fd = take_fd(message);  // before any error is thrown, so that it does not stay open
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw UnavailableError("no descriptor is left for memory that a process of this host shares; raise `ulimit -n`");
  }
  packet.bytes.resize(static_cast<std::size_t>(got));
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

}  // namespace samestep
