#include "os/peer_watch.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

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

constexpr Seconds kSilence{7};      // of a host that is asked for a connection; who waits asks after a second
constexpr Seconds kLastWords{0.5};  // between a death and the telling of it
constexpr Seconds kLookEvery{20e-3};
constexpr Seconds kTryAfresh{1};  // a first packet that is lost; the kernel asks again after 1, 2 and 4 s

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t nbytes = 0;
};

bool tells_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN || error == ENETDOWN;
}

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
    throw InvalidArgumentError(str("'", address, "' is no address"));
  }
  return parsed;
}

}  // namespace

struct PeerWatch::Peer {
  SocketAddress address;
  std::string where;
  std::optional<TcpSocket> socket = {};
  bool connected = false;
  Clock::time_point asked{};  // when it was last known to live, or first asked after
  Clock::time_point tried{};
  Clock::time_point died{};
  std::string why = {};
};

PeerWatch::PeerWatch(Fd listener, const std::vector<Place>& places) : listener_(std::move(listener)) {
  for (const Place& place : places) {
    peers_.push_back(std::make_unique<Peer>(Peer{parse(place.address, place.port), place.where}));
  }
  close_in_forks(listener_.get());
}

PeerWatch::~PeerWatch() { forget_in_forks(listener_.get()); }

void PeerWatch::ask_after(std::size_t number) {
  const std::lock_guard lock(mutex_);
  Peer& peer = *peers_[number];
  if (peer.socket || !peer.why.empty()) return;
  if (peer.asked == Clock::time_point{}) peer.asked = Clock::now();
  connect(peer);
}

std::string PeerWatch::death(std::size_t number) {
  const std::lock_guard lock(mutex_);
  look();
  const Peer& peer = *peers_[number];
  return !peer.why.empty() && Clock::now() - peer.died > kLastWords ? peer.why : "";
}

void PeerWatch::connect(Peer& peer) {
  Fd fd(::socket(peer.address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return;  // there are no more descriptors: asked again later
  peer.socket.emplace(std::move(fd));
  peer.connected = false;
  peer.tried = Clock::now();
  const auto* address = reinterpret_cast<const sockaddr*>(&peer.address.bytes);
  const int failed = ::connect(peer.socket->fd(), address, peer.address.nbytes);
  if (failed != 0 && errno != EINPROGRESS) conclude(peer, errno);
}

void PeerWatch::look() {
  const Clock::time_point now = Clock::now();
  if (now - looked_ < kLookEvery) return;
  looked_ = now;
  for (const auto& peer : peers_) {
    if (peer->socket) look_at(*peer);
  }
}

void PeerWatch::look_at(Peer& peer) {
  pollfd entry{peer.socket->fd(), static_cast<short>(peer.connected ? POLLRDHUP : POLLOUT), 0};
  const bool has_news = ::poll(&entry, 1, 0) > 0;
  if (!has_news) {
    if (peer.connected) return;
    if (looked_ - peer.asked > kSilence) {
      conclude(peer, ETIMEDOUT);
    } else if (looked_ - peer.tried > kTryAfresh) {
      connect(peer);
    }
    return;
  }
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.socket->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (peer.connected && !tells_silence(error)) {
    peer.asked = looked_;
    connect(peer);  // connections end for many reasons: who lives lets a new one come
  } else if (error != 0) {
    conclude(peer, error);
  } else {
    peer.connected = true;
  }
}

void PeerWatch::conclude(Peer& peer, int error) {
  peer.socket.reset();
  const bool is_gone = error == ECONNREFUSED || error == ECONNRESET;
  // Of a new connection the kernel says so after three seconds of asking for the host: twice is enough. It ends one
  // that was there, whatever it calls the reason, once nothing has come for as long as TcpSocket bears.
  const bool for_long = error == ETIMEDOUT || peer.connected || Clock::now() - peer.asked > kSilence / 2;
  if (is_gone) {
    peer.why = str("its process, at ", peer.where, ", has ended");
  } else if (tells_silence(error) && for_long) {
    peer.why = str("its host does not answer at ", peer.where, ": ", std::strerror(error));
  }  // else it is asked again
  peer.died = Clock::now();
}

}  // namespace samestep
