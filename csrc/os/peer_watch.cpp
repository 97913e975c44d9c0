#include "os/peer_watch.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "os/after_fork.h"
#include "os/tcp_socket.h"

namespace samestep {
namespace {

constexpr Seconds kCheckEvery{20e-3};
constexpr Seconds kConfirmAfter{0.2};  // after an answer that must be confirmed
constexpr Seconds kLongGap{1};         // between two polls: answers were not read meanwhile
constexpr int kMaxRefusals = 3;        // in a row: one may come from a firewall that is being reloaded
constexpr int kMaxUnanswered = 4;      // to a host, in a row and without an answer

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t nbytes = 0;
};

SocketAddress parse(const std::string& address, std::uint16_t port) {
  SocketAddress parsed;
  auto& v4 = reinterpret_cast<sockaddr_in&>(parsed.bytes);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(parsed.bytes);
  if (::inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    parsed.nbytes = sizeof v4;
  } else if (::inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    parsed.nbytes = sizeof v6;
  } else {
    throw InvalidArgumentError(str("'", address, "' is not an IPv4 or IPv6 address"));
  }
  return parsed;
}

/// Errors of a connection that were not caused by a packet of the other host.
bool is_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN || error == ENETDOWN;
}

/// A probe of one port: a connection attempt.
class Question {
 public:
  explicit Question(const SocketAddress& address) : address_(address) {}

  bool is_open() const { return socket_.has_value(); }
  bool is_connected() const { return connected_; }
  Clock::time_point asked_at() const { return asked_at_; }

  /// Sends a probe. 0 while the answer is outstanding, else an errno. Does nothing if no file descriptors are left.
  int ask(Clock::time_point now) {
    close();
    asked_at_ = now;
    // Without a descriptor nothing was asked, so that nothing is concluded from the silence.
    Fd fd(::socket(address_.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) return 0;
    socket_.emplace(std::move(fd));
    const auto* address = reinterpret_cast<const sockaddr*>(&address_.bytes);
    if (::connect(socket_->fd(), address, address_.nbytes) == 0 || errno == EINPROGRESS) return 0;
    const int error = errno;
    close();
    return error;
  }

  /// Whether an answer has arrived since the last call. `error`: 0 if the connection was accepted or closed.
  bool answered(int& error) {
    if (!socket_) return false;
    // POLLOUT reports the outcome of the attempt. Once connected, only the end of the connection is news.
    pollfd entry{socket_->fd(), static_cast<short>(connected_ ? POLLRDHUP : POLLOUT), 0};
    if (::poll(&entry, 1, 0) <= 0) return false;
    socklen_t size = sizeof error;
    if (::getsockopt(socket_->fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    const bool is_made = !connected_ && error == 0;
    is_made ? void(connected_ = true) : close();
    return true;
  }

  /// Whether the other host has confirmed the connection within the last `span`. The kernel probes it every 2 s.
  bool confirmed_within(Seconds span) const { return connected_ && socket_->acknowledged_within(span); }

  void close() {
    socket_.reset();
    connected_ = false;
  }

 private:
  SocketAddress address_;
  std::optional<TcpSocket> socket_ = {};
  bool connected_ = false;
  Clock::time_point asked_at_{};
};

}  // namespace

struct PeerWatch::Peer {
  Question process;  // at the port at which it listens
  Question host;     // at the reserved one
  std::string where;
  bool watched = false;
  Clock::time_point last_answer{};  // of the host
  int n_refusals = 0;               // of the process, in a row
  Clock::time_point refused{};
  int n_unanswered = 0;   // by the host, in a row
  int error = ETIMEDOUT;  // what the host's silence is called
  Clock::time_point died{};
  std::string why = {};
};

PeerWatch::PeerWatch(Fd listener, Fd reserved, const std::vector<Place>& places, const Times& times)
    : times_(times), listener_(std::move(listener)), reserved_(std::move(reserved)) {
  for (const Place& place : places) {
    peers_.push_back(std::make_unique<Peer>(Peer{Question(parse(place.address, place.port)),
                                                 Question(parse(place.address, place.reserved_port)), place.where}));
  }
  // A child that kept the port open would make this process look alive after its end.
  close_in_forks(listener_.get());
}

PeerWatch::~PeerWatch() { forget_in_forks(listener_.get()); }

void PeerWatch::watch(std::size_t number) {
  const std::lock_guard lock(mutex_);
  Peer& peer = *peers_[number];
  if (peer.watched || !peer.why.empty()) return;
  peer.watched = true;
  peer.last_answer = Clock::now();
  check_process(peer);
}

std::string PeerWatch::death(std::size_t number) {
  const std::lock_guard lock(mutex_);
  check_all();
  const Peer& peer = *peers_[number];
  // Later than it is known: the peer may have sent a notice before, which names the true cause.
  return !peer.why.empty() && Clock::now() - peer.died > times_.report_delay ? peer.why : "";
}

void PeerWatch::check_all() {
  const Clock::time_point now = Clock::now();
  const auto gap = now - last_check_;
  if (gap < kCheckEvery) return;
  last_check_ = now;
  for (const auto& peer : peers_) {
    if (!peer->watched) continue;
    if (gap > kLongGap) {  // this rank did not poll: only probes from now on count
      peer->last_answer = now;
      peer->n_unanswered = 0;
    }
    check(*peer);
  }
}

void PeerWatch::check(Peer& peer) {
  check_process(peer);
  // A refusal comes from a kernel that runs, so this is the end of the process and not of its host.
  if (peer.n_refusals >= kMaxRefusals) {
    peer.died = peer.refused;
    return conclude(peer, str("its process, at ", peer.where, ", has ended"));
  }
  // The end of a host has no packet of its own. It is concluded from silence, and only after several probes, since any
  // of them can be lost.
  check_host(peer);
  if (last_check_ - peer.last_answer > times_.silence && peer.n_unanswered >= kMaxUnanswered) {
    peer.died = last_check_;
    conclude(peer, str("its host does not answer at ", peer.where, ": ", std::strerror(peer.error)));
  }
}

void PeerWatch::check_process(Peer& peer) {
  int error = 0;
  bool answered = peer.process.answered(error);
  if (!answered && !peer.process.is_connected()) {
    // An answer that is no proof is asked for again soon. While there is none, the attempt is made afresh now and then:
    // the kernel would repeat its packet at doubling intervals.
    const Seconds pause = peer.process.is_open() ? times_.retry : std::min(kConfirmAfter, times_.retry);
    if (Clock::now() - peer.process.asked_at() < pause) return;
    error = peer.process.ask(Clock::now());
    answered = error != 0;
  }
  // Silence says nothing about the process; see `check_host`.
  if (!answered || is_silence(error)) return;
  peer.last_answer = Clock::now();
  peer.n_unanswered = 0;
  // The first refusal is taken as the time of death: what follows only confirms it.
  if (error != ECONNREFUSED) {
    peer.n_refusals = 0;
  } else if (peer.n_refusals++ == 0) {
    peer.refused = Clock::now();
  }
}

void PeerWatch::check_host(Peer& peer) {
  int error = 0;
  // The kernel's keepalive on the open connection is an answer of the host without a probe of ours. The host is asked
  // at its reserved port only if that has been missing.
  bool answered = peer.process.confirmed_within(times_.silence / 2);
  if (!answered && last_check_ - peer.last_answer > times_.silence / 3) {
    answered = peer.host.answered(error);
    if (!answered && last_check_ - peer.host.asked_at() > times_.retry / 2) {
      if (peer.host.is_open()) ++peer.n_unanswered;
      error = peer.host.ask(last_check_);
      answered = error != 0;
    }
  }
  if (!answered) return;
  if (is_silence(error)) {
    peer.error = error;
    ++peer.n_unanswered;
  } else {
    peer.last_answer = last_check_;
    peer.n_unanswered = 0;
    peer.host.close();
  }
}

void PeerWatch::conclude(Peer& peer, std::string why) {
  peer.why = std::move(why);
  peer.watched = false;
  peer.process.close();
  peer.host.close();
}

}  // namespace samestep
