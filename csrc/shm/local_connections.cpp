#include "shm/local_connections.h"

#include <array>
#include <cstring>
#include <optional>
#include <random>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

constexpr int kAcceptsPerCheck = 64;   // connections between two checks of the deadline
constexpr int kMaxUnidentified = 256;  // connections of this user that have sent nothing

using Token = std::array<unsigned char, 16>;

/// What the ranks gather first.
struct PeerInfo {
  std::array<char, 16> listener;
  Token token;
  std::uint64_t word;
};
/// The first packet on a connection. A connection without the token is closed.
struct Hello {
  Token token;
  std::int32_t rank;
};

Token random_token() {
  Token token;
  std::random_device random;
  for (unsigned char& byte : token) byte = static_cast<unsigned char>(random());
  return token;
}

/// Compares in constant time, so that timing reveals nothing about the token.
bool equal(const Token& one, const Token& other) {
  unsigned different = 0;
  for (std::size_t i = 0; i < one.size(); ++i) different |= one[i] ^ other[i];
  return different == 0;
}

std::vector<PeerInfo> introduce(const PeerInfo& mine, int size, const Exchange& exchange) {
  std::vector<PeerInfo> all;
  for (const std::string& bytes : exchange({reinterpret_cast<const char*>(&mine), sizeof mine})) {
    if (bytes.size() != sizeof mine) throw Error(str("rank ", all.size(), " runs another version of samestep"));
    std::memcpy(&all.emplace_back(), bytes.data(), sizeof mine);
  }
  if (static_cast<int>(all.size()) != size) throw Error("the ranks of this host do not agree on their number");
  return all;
}

/// Accepts the connections of the ranks above this one.
class Doorkeeper {
 public:
  Doorkeeper(UnixListener& listener, const Token& token, int rank, std::vector<LocalPeer>& peers)
      : listener_(listener), token_(token), rank_(rank), peers_(peers) {}

  void let_all_in(const Deadline& deadline) {
    for (;;) {
      accept();
      std::erase_if(unidentified_, [&](UnixSocket& socket) { return identify(socket); });
      const int missing = first_unconnected();
      if (missing == size()) return;
      if (deadline.passed()) {
        throw TimeoutError(
            str("rank ", missing, " of this host has not connected after ", deadline.timeout().count(), " s"));
      }
      std::vector<int> fds{listener_.fd().get()};
      for (const UnixSocket& socket : unidentified_) fds.push_back(socket.fd().get());
      wait_until_readable(fds);
    }
  }

 private:
  int size() const { return static_cast<int>(peers_.size()); }
  const Fd& connection(int rank) const { return peers_[static_cast<std::size_t>(rank)].socket.fd(); }

  int first_unconnected() const {
    int rank = rank_ + 1;
    while (rank < size() && connection(rank)) ++rank;
    return rank;
  }

  void accept() {
    bool no_descriptors = false;
    // Bounded, because a stranger may connect as fast as this rank accepts.
    for (int i = 0; i < kAcceptsPerCheck; ++i) {
      std::optional<UnixSocket> socket = listener_.accept_now(no_descriptors);
      if (!socket) break;
      // Connections of other users are closed at once, and cannot push out those of ranks.
      if (socket->is_same_user()) unidentified_.push_back(std::move(*socket));
    }
    // Ranks send their token at once, so the oldest are not ranks.
    std::size_t room = static_cast<std::size_t>(size() + kMaxUnidentified);
    if (no_descriptors) {
      if (unidentified_.empty())
        throw Error("cannot accept a process of this host: no descriptor is left; raise `ulimit -n`");
      room = unidentified_.size() / 2;
    }
    if (unidentified_.size() > room) {
      unidentified_.erase(unidentified_.begin(), unidentified_.end() - static_cast<std::ptrdiff_t>(room));
    }
  }

  /// True once the connection is known to be that of a rank, or not; false while it has sent nothing.
  bool identify(UnixSocket& socket) {
    try {
      const auto packet = socket.receive_now();
      if (!packet) return false;
      Hello hello;
      // Any process of this user can connect and send anything, so nothing in the packet is trusted before the token is
      // right.
      if (packet->bytes.size() != sizeof hello || packet->fd) return true;
      std::memcpy(&hello, packet->bytes.data(), sizeof hello);
      const bool is_new = hello.rank > rank_ && hello.rank < size() && !connection(hello.rank);
      if (is_new && equal(hello.token, token_)) {
        peers_[static_cast<std::size_t>(hello.rank)].socket = std::move(socket);
      }
    } catch (const Error&) {  // it was closed, or came with more than one descriptor
    }
    return true;
  }

  UnixListener& listener_;
  const Token& token_;
  const int rank_;
  std::vector<LocalPeer>& peers_;
  std::vector<UnixSocket> unidentified_;  // connections of this user without a token yet, the oldest first
};

}  // namespace

std::vector<LocalPeer> connect_local_peers(int rank, int size, std::uint64_t word, const Exchange& exchange,
                                           const Deadline& deadline) {
  UnixListener listener;
  PeerInfo mine{{}, random_token(), word};
  if (listener.name().size() > mine.listener.size()) throw Error("the kernel's name of a socket is too long");
  std::memcpy(mine.listener.data(), listener.name().data(), listener.name().size());
  const std::vector<PeerInfo> all = introduce(mine, size, exchange);
  std::vector<LocalPeer> peers(static_cast<std::size_t>(size));
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    const PeerInfo& to = all[peer];
    peers[peer].word = to.word;
    // Each rank connects to those below it and accepts those above. Rank 0 only accepts, so that full queues, in which
    // others wait for room, are emptied from there upwards.
    if (static_cast<int>(peer) >= rank) continue;
    const std::string name(to.listener.data(), ::strnlen(to.listener.data(), to.listener.size()));
    peers[peer].socket = connect_to(name, deadline);
    const Hello hello{to.token, rank};
    peers[peer].socket.send(&hello, sizeof hello);
  }
  Doorkeeper(listener, mine.token, rank, peers).let_all_in(deadline);
  return peers;
}

}  // namespace samestep
