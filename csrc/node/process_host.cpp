#include "node/process_host.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <random>

#include "core/error.h"
#include "core/format.h"
#include "node/shared_heap.h"
#include "os/cross_memory.h"
#include "os/process_watch.h"
#include "os/unix_socket.h"

namespace samestep {
namespace {

using Token = std::array<unsigned char, 16>;

/// What a rank tells all others first.
struct Introduction {
  std::array<char, 16> listener;
  Token token;
  std::uint64_t probe;  // address of a word that holds its rank
};
/// First packet on a connection: whoever does not know the token is a stranger.
struct Hello {
  Token token;
  std::int32_t rank;
};
/// Goes with a descriptor.
struct Gift {
  enum class Kind : std::uint32_t { arena, segment } kind;
  std::uint32_t number;
};

Token random_token() {
  Token token;
  std::random_device random;
  for (unsigned char& byte : token) byte = static_cast<unsigned char>(random());
  return token;
}

template <class T>
std::string as_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T as_value(const std::string& bytes, int rank) {
  T value;
  if (bytes.size() != sizeof value) throw Error(str("rank ", rank, " runs another version of samestep"));
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

constexpr int kOffsetBits = 40;

class ProcessHost final : public Host {
 public:
  ProcessHost(int rank, int size)
      : rank_(rank), probe_(static_cast<std::uint64_t>(rank)), peers_(static_cast<std::size_t>(size)) {}

  void meet(const Exchange& exchange, const Deadline& deadline);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes, const Deadline& deadline) override;
  std::uint64_t place_of(const void* data, std::size_t nbytes) override;
  std::byte* at(int peer, std::uint64_t place, std::size_t nbytes) override;
  std::shared_ptr<SharedHeap> heap() override { return heap_; }
  bool ended(int peer) const override;
  bool reaches_memory() const override { return reaches_memory_; }
  using Host::pull;
  using Host::push;
  bool pull(int peer, std::span<const Piece> pieces) override { return pull_memory(of(peer).pid, pieces); }
  bool push(int peer, std::span<const Piece> pieces) override { return push_memory(of(peer).pid, pieces); }

 private:
  struct Segment {
    SharedMemory memory;
    std::vector<bool> seen;                  // parts whose pages this process has
    std::size_t seen_from = 0, seen_to = 0;  // the range looked at last
  };
  struct Peer {
    UnixSocket socket;
    pid_t pid = 0;
    ProcessWatch watch;
    std::vector<Segment> segments;
    std::deque<SharedMemory> arenas;  // given and not yet taken
  };

  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& of(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  void connect(int peer, const Introduction& to);
  bool accept(UnixListener& listener, const Token& token, const Deadline& deadline);
  bool can_reach(const std::vector<Introduction>& all);
  bool give_segment(std::uint32_t number, const SharedMemory& segment);
  std::optional<UnixSocket::Packet> receive(int peer, const Deadline& deadline);
  void take_gift(int peer, const Deadline& deadline);
  static void see(Segment& segment, std::size_t offset, std::size_t nbytes);

  int rank_;
  volatile std::uint64_t probe_;
  std::vector<Peer> peers_;
  bool reaches_memory_ = false;
  std::recursive_mutex mutex_;
  std::shared_ptr<SharedHeap> heap_ = std::make_shared<SharedHeap>();
};

void ProcessHost::connect(int peer, const Introduction& to) {
  UnixSocket socket = connect_to(std::string(to.listener.data(), ::strnlen(to.listener.data(), to.listener.size())));
  const Hello hello{to.token, rank_};
  socket.send(&hello, sizeof hello);
  of(peer).socket = std::move(socket);
}

bool ProcessHost::accept(UnixListener& listener, const Token& token, const Deadline& deadline) {
  std::optional<UnixSocket> socket = listener.accept(deadline);
  if (!socket) return false;
  try {
    const auto packet = socket->receive(Deadline::after(Seconds(5)));
    Hello hello;
    if (!packet || packet->bytes.size() != sizeof hello) return true;
    std::memcpy(&hello, packet->bytes.data(), sizeof hello);
    if (hello.token == token && hello.rank > rank_ && hello.rank < size()) of(hello.rank).socket = std::move(*socket);
  } catch (const PeerLostError&) {  // a stranger, gone again
  }
  return true;
}

void ProcessHost::meet(const Exchange& exchange, const Deadline& deadline) {
  UnixListener listener;
  Introduction mine{{}, random_token(), reinterpret_cast<std::uintptr_t>(&probe_)};
  if (listener.name().size() > mine.listener.size()) throw Error("the kernel's name of a socket is too long");
  std::memcpy(mine.listener.data(), listener.name().data(), listener.name().size());
  allow_memory_access();
  std::vector<Introduction> all;
  for (const std::string& bytes : exchange(as_bytes(mine))) {
    all.push_back(as_value<Introduction>(bytes, static_cast<int>(all.size())));
  }
  for (int peer = 0; peer < rank_; ++peer) connect(peer, all[static_cast<std::size_t>(peer)]);
  for (int peer = rank_ + 1; peer < size(); ++peer) {
    while (!of(peer).socket.fd()) {
      if (accept(listener, mine.token, deadline)) continue;
      throw TimeoutError(
          str("rank ", peer, " of this host has not connected after ", deadline.timeout().count(), " s"));
    }
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    of(peer).pid = of(peer).socket.peer();
    of(peer).watch = ProcessWatch(of(peer).pid);
  }
  const std::vector<std::string> verdicts = exchange(can_reach(all) ? "1" : "0");
  reaches_memory_ = std::all_of(verdicts.begin(), verdicts.end(), [](const std::string& v) { return v == "1"; });
}

bool ProcessHost::can_reach(const std::vector<Introduction>& all) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    std::uint64_t word = ~std::uint64_t{0};
    const std::uint64_t address = all[static_cast<std::size_t>(peer)].probe;
    if (of(peer).pid == 0 || !pull(peer, &word, address, sizeof word)) return false;
    if (word != static_cast<std::uint64_t>(peer) || !push(peer, address, &word, sizeof word)) return false;
  }
  return true;
}

bool ProcessHost::ended(int peer) const {
  const Peer& p = of(peer);
  return p.watch.ended() || (p.pid == 0 && p.socket.at_end());
}

// ---- memory

bool ProcessHost::give_segment(std::uint32_t number, const SharedMemory& segment) {
  const Gift gift{Gift::Kind::segment, number};
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    try {
      of(peer).socket.send(&gift, sizeof gift, &segment.fd());
    } catch (const PeerLostError&) {  // whoever waits for it learns of it
    } catch (const UnavailableError&) {
      return false;
    }
  }
  return true;
}

std::optional<UnixSocket::Packet> ProcessHost::receive(int peer, const Deadline& deadline) {
  try {
    return of(peer).socket.receive(deadline);
  } catch (const PeerLostError&) {
    throw PeerLostError(str("rank ", peer, " of this host has not shared its memory: its process has ended"));
  }
}

void ProcessHost::take_gift(int peer, const Deadline& deadline) {
  auto packet = receive(peer, deadline);
  if (!packet) {
    throw TimeoutError(
        str("rank ", peer, " of this host has not shared its memory after ", deadline.timeout().count(), " s"));
  }
  Gift gift;
  if (packet->bytes.size() != sizeof gift || !packet->fd)
    throw Error("an unknown packet came from a rank of this host");
  std::memcpy(&gift, packet->bytes.data(), sizeof gift);
  SharedMemory memory = SharedMemory::open(std::move(packet->fd));
  memory.close_fd();
  if (gift.kind == Gift::Kind::arena) {
    of(peer).arenas.push_back(std::move(memory));
  } else {
    std::vector<Segment>& segments = of(peer).segments;
    segments.resize(std::max<std::size_t>(segments.size(), gift.number + 1));
    segments[gift.number].memory = std::move(memory);
  }
}

std::shared_ptr<std::byte> ProcessHost::share(std::span<const int> members, std::size_t nbytes,
                                              const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  SharedMemory memory;
  if (const int giver = members.front(); giver == rank_) {
    memory = SharedMemory::make("samestep", nbytes);
    const Gift gift{Gift::Kind::arena, 0};
    for (const int peer : members) {
      if (peer != rank_) of(peer).socket.send(&gift, sizeof gift, &memory.fd());
    }
    memory.close_fd();
  } else {
    while (of(giver).arenas.empty()) take_gift(giver, deadline);
    memory = std::move(of(giver).arenas.front());
    of(giver).arenas.pop_front();
  }
  const auto kept = std::make_shared<SharedMemory>(std::move(memory));
  return {kept, kept->data()};
}

std::uint64_t ProcessHost::place_of(const void* data, std::size_t nbytes) {
  const auto spot = heap_->find(data, nbytes);
  const auto give = [&](const SharedMemory& segment) { return give_segment(spot->segment, segment); };
  if (!spot || !heap_->announce(spot->segment, give)) return reinterpret_cast<std::uintptr_t>(data);
  return kShared | (static_cast<std::uint64_t>(spot->segment) << kOffsetBits) | spot->offset;
}

std::byte* ProcessHost::at(int peer, std::uint64_t place, std::size_t nbytes) {
  if ((place & kShared) == 0) return nullptr;
  const std::size_t number = (place & ~kShared) >> kOffsetBits;
  const std::size_t offset = place & ((std::uint64_t{1} << kOffsetBits) - 1);
  const std::lock_guard lock(mutex_);
  std::vector<Segment>& segments = of(peer).segments;
  // It was sent before the place was told, so it is here.
  while (segments.size() <= number || !segments[number].memory) take_gift(peer, Deadline::after(Seconds(10)));
  Segment& segment = segments[number];
  if (offset < segment.seen_from || offset + nbytes > segment.seen_to) see(segment, offset, nbytes);
  return segment.memory.data() + offset;
}

void ProcessHost::see(Segment& segment, std::size_t offset, std::size_t nbytes) {
  // Parts like those of the heap: all of their pages are present already, so none is made for nothing.
  constexpr std::size_t kPart = SharedHeap::kPart;
  segment.seen.resize(segment.memory.nbytes() / kPart);
  const std::size_t end = (offset + nbytes + kPart - 1) / kPart;
  for (std::size_t part = offset / kPart; part < end; ++part) {
    const std::size_t first = part;
    while (part < end && !segment.seen[part]) segment.seen[part++] = true;
    if (part != first) populate(segment.memory.data() + first * kPart, (part - first) * kPart);
  }
  segment.seen_from = offset;
  segment.seen_to = offset + nbytes;
}

}  // namespace

std::shared_ptr<Host> meet_processes(int rank, int size, const Exchange& exchange, const Deadline& deadline) {
  auto host = std::make_shared<ProcessHost>(rank, size);
  host->meet(exchange, deadline);
  return host;
}

}  // namespace samestep
