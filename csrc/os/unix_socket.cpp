#include "os/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"

namespace samestep {
namespace {

constexpr std::size_t kLongestPacket = 4096;
constexpr std::size_t kMaxFds = 253;  // in one packet: SCM_MAX_FD of the kernel
constexpr int kPauseMs = 20;
constexpr std::chrono::milliseconds kUntilRoom{2};

Fd make_socket(int flags) {
  // Packets keep their borders, so that a descriptor arrives together with the bytes that describe it.
  return checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0), "cannot make a socket");
}

/// Owns all descriptors that came with a message, and closes those that are not kept.
std::vector<Fd> take_fds(msghdr& message) {
  std::vector<Fd> found;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < n; ++i) {
      // The descriptors have no alignment that could be relied on.
      int number;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof number, sizeof number);
      found.emplace_back(number);
    }
  }
  return found;
}

ucred credentials(const Fd& fd) {
  ucred who{0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t size = sizeof who;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return {0, static_cast<uid_t>(-1), 0};
  return who;
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
  const int fd = fd_.get();
  for (;;) {
    if (auto packet = receive_now()) return packet;
    if (deadline.passed()) return std::nullopt;
    wait_until_readable({&fd, 1});
  }
}

std::optional<UnixSocket::Packet> UnixSocket::receive_now() {
  Packet packet;
  packet.bytes.resize(kLongestPacket);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Room for all that the kernel lets through: then it cuts off only what this process has no descriptors for.
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  // ECONNRESET is reported once, before the data that the peer has sent, if the peer had not read everything.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (got < 0 && errno != ECONNRESET) throw_errno("cannot receive from a process of this host");
  if (got <= 0) throw PeerLostError("the process at the other end has ended");
  // Before any error is thrown, so that none of them stays open.
  std::vector<Fd> fds = take_fds(message);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw UnavailableError("no descriptor is left for memory that a process of this host shares; raise `ulimit -n`");
  }
  packet.bytes.resize(static_cast<std::size_t>(got));
  if (fds.size() > 1) throw Error("a process of this host sent more descriptors than one");
  if (!fds.empty()) packet.fd = std::move(fds.front());
  return packet;
}

pid_t UnixSocket::peer() const { return credentials(fd_).pid; }

bool UnixSocket::is_same_user() const { return credentials(fd_).uid == ::geteuid(); }

bool UnixSocket::at_end() const {
  pollfd entry{fd_.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void wait_until_readable(std::span<const int> fds) {
  wait_hooks().interrupt();
  std::vector<pollfd> entries;
  entries.reserve(fds.size());
  for (const int fd : fds) entries.push_back({fd, POLLIN, 0});
  ::poll(entries.data(), entries.size(), kPauseMs);
}

UnixListener::UnixListener() : fd_(make_socket(SOCK_NONBLOCK)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Without a name the kernel picks one in the abstract namespace, which needs no file.
  if (::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) throw_errno("cannot bind");
  if (::listen(fd_.get(), SOMAXCONN) != 0) throw_errno("cannot listen");
  socklen_t size = sizeof address;
  if (::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) throw_errno("cannot get the name");
  name_.assign(address.sun_path + 1, size - sizeof(sa_family_t) - 1);
}

std::optional<UnixSocket> UnixListener::accept_now(bool& no_descriptors) {
  // Without SOCK_NONBLOCK: sends wait for room, and receives ask for MSG_DONTWAIT themselves.
  const int fd = ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return std::nullopt;
  no_descriptors = fd < 0 && (errno == EMFILE || errno == ENFILE);
  if (no_descriptors) return std::nullopt;
  return UnixSocket(checked(fd, "cannot accept a process of this host"));
}

UnixSocket connect_to(const std::string& name, const Deadline& deadline) {
  Fd fd = make_socket(SOCK_NONBLOCK);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  // A name of the abstract namespace begins with a zero and has a length instead of an end.
  const auto size = static_cast<socklen_t>(sizeof(sa_family_t) + 1 + name.size());
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    // The queue is full, perhaps of strangers; the listener empties it in its turn.
    if (errno != EAGAIN && errno != EINTR) throw_errno("cannot connect to a process of this host");
    if (deadline.passed()) {
      throw TimeoutError(str("a process of this host has had no room for a connection for ", deadline.timeout().count(),
                             " s: other processes fill its queue"));
    }
    wait_hooks().interrupt();
    std::this_thread::sleep_for(kUntilRoom);
  }
  // The kernel recorded them when the other process began to listen. Names of this namespace belong to nobody, so
  // another user may listen at one that a rank has left.
  const ucred who = credentials(fd);
  if (who.uid != ::geteuid()) {
    throw UnavailableError(str("where a rank of this host should listen is a process of another user (uid ", who.uid,
                               "); all ranks have to run as one user"));
  }
  if (::fcntl(fd.get(), F_SETFL, 0) != 0) throw_errno("cannot use a connection");  // sending waits for room
  return UnixSocket(std::move(fd));
}

}  // namespace samestep
