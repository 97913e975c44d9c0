#include "os/tcp_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "os/after_fork.h"

namespace samestep {
namespace {

void set(int fd, int level, int option, int value) {
  if (::setsockopt(fd, level, option, &value, sizeof value) != 0) throw_errno("cannot set an option of a connection");
}

TcpSocket::Outcome outcome(ssize_t got, bool reads) {
  using Kind = TcpSocket::Outcome::Kind;
  if (got > 0) return {Kind::moved, static_cast<std::size_t>(got)};
  if (got == 0)
    return reads ? TcpSocket::Outcome{Kind::ended, 0, "closed by the other side"} : TcpSocket::Outcome{Kind::later};
  // EINTR as well: the caller polls again anyway.
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {Kind::later};
  return {Kind::ended, 0, std::strerror(errno)};
}

std::atomic<double> patience_s = 8.0;

}  // namespace

// relaxed: publishes no other data
void TcpSocket::set_patience(Seconds patience) { patience_s.store(patience.count(), std::memory_order_relaxed); }
Seconds TcpSocket::patience() { return Seconds(patience_s.load(std::memory_order_relaxed)); }  // relaxed: as above

TcpSocket::TcpSocket(Fd fd) : fd_(std::move(fd)) {
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("cannot use a connection");
  // SO_SNDBUF and SO_RCVBUF are not set: they would disable the kernel's autotuning, whose limits are higher.
  // Nagle's algorithm would hold a short frame back until the one before has been acknowledged.
  set(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  const int seconds = static_cast<int>(patience().count());
  const int idle = std::max(1, seconds / 4), interval = std::max(1, seconds / 8);
  set(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, idle);
  set(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, (seconds - idle) / interval);  // many, because packets may be lost
  close_in_forks(fd_.get());
}

TcpSocket::Outcome TcpSocket::read(std::span<const iovec> parts) {
  return outcome(::readv(fd_.get(), parts.data(), static_cast<int>(parts.size())), /*reads=*/true);
}

TcpSocket::Outcome TcpSocket::write(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  // MSG_NOSIGNAL: a connection that is closed is an error here, where SIGPIPE would end the process.
  return outcome(::sendmsg(fd_.get(), &message, MSG_NOSIGNAL), /*reads=*/false);
}

bool TcpSocket::silent() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  if (Seconds(info.tcpi_last_ack_recv * 1e-3) < patience()) return false;
  // Not TCP_USER_TIMEOUT: it also ends connections to a process that is merely busy, once its buffers are full, for it
  // does not count the answers of its host. Such a host is asked ever more rarely: one probe may be in flight.
  return (info.tcpi_unacked > 0 && info.tcpi_retransmits > 1) || info.tcpi_probes > 1;
}

bool TcpSocket::acknowledged_within(Seconds span) const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return Seconds(info.tcpi_last_ack_recv * 1e-3) < span;
}

void TcpSocket::end_sending() { ::shutdown(fd_.get(), SHUT_WR); }

void TcpSocket::close() {
  if (!fd_) return;
  // Before the descriptor is closed: its number may be given to another file at once, which a child would lose.
  forget_in_forks(fd_.get());
  fd_ = Fd();
}

}  // namespace samestep
