#include "shm/process_peers.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/format.h"
#include "os/after_fork.h"
#include "os/cross_memory.h"
#include "os/process_watch.h"
#include "os/unix_socket.h"
#include "process/wait_hooks.h"
#include "shm/shared_heap.h"

namespace samestep {
namespace {

/// Between the ranks of a host.
struct FdMessage {
  enum class Kind : std::uint64_t {
    region,   // with the descriptor of a group's memory
    segment,  // with that of a segment of the sender's heap
    refusal,  // with the text of the error that comes in place of a region
    here,     // the sender has come to the group
    gone,     // the sender waits for the group no longer
  } kind;
  std::uint64_t number;  // of the group or of the segment
};

constexpr std::string_view kWithoutSharing =
    "; SAMESTEP_NATIVE_TRANSPORT=tcp (over MPI: SAMESTEP_MPI_TRANSPORT=mpi) on all ranks does without such memory";

SharedMemory map_received(Fd fd) {
  try {
    return SharedMemory::open(std::move(fd));
  } catch (const UnavailableError& error) {
    throw UnavailableError(str(error.what(), kWithoutSharing));
  }
}

/// Holds its own address. Peers read and write it by CMA, which the compiler cannot see.
volatile std::uint64_t probe = reinterpret_cast<std::uintptr_t>(&probe);

constexpr int kOffsetBits = 40;
constexpr std::uint64_t kMaxSegments = 1u << 20;

class ProcessPeers final : public LocalPeers {
 public:
  ProcessPeers(int rank, std::vector<Fd> links);
  ~ProcessPeers() override {
    for (const Peer& peer : peers_) forget_in_forks(peer.socket.fd().get());
  }

  /// Finds out whether all ranks have CMA. Collective.
  void probe_all(const std::vector<std::uint64_t>& probes, const Deadline& deadline);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                   const Deadline& deadline) override;
  Meeting meet(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
               const Deadline& deadline) override;
  std::uint64_t to_remote_address(const void* data, std::size_t nbytes) override;
  std::byte* map_peer_memory(int peer, std::uint64_t address, std::size_t nbytes) override;
  std::shared_ptr<SharedHeap> heap() override { return heap_; }
  bool ended(int peer) const override;
  bool has_cma() const override { return has_cma_; }
  using LocalPeers::read_peer;
  bool hides(Buffers buffers) const override { return has_cma_ && !is_open_to_others(self_, buffers); }
  bool read_peer(int peer, std::span<const RemoteSegment> pieces) override {
    return pull_memory(of(peer).pid, pieces) || (is_forbidden() && pull_memory_by_file(of(peer).pid, pieces));
  }
  bool write_peer(int peer, std::uint64_t gate, std::span<const RemoteSegment> pieces) override {
    return push_memory(of(peer).pid, gate, pieces) ||
           (is_forbidden() && push_memory_by_file(of(peer).pid, gate, pieces));
  }
  std::uint64_t open_gate() override { return has_cma_ ? samestep::open_gate() : 0; }
  void close_gate(std::uint64_t gate) override { samestep::close_gate(gate); }
  void free_gate(std::uint64_t gate) override { samestep::free_gate(gate); }
  bool is_stopped(int peer) const override { return of(peer).watch.is_stopped(); }

 private:
  struct Segment {
    SharedMemory memory;
    std::vector<bool> seen;                  // parts whose pages are mapped in this process
    std::size_t seen_from = 0, seen_to = 0;  // the range checked last
  };
  struct Arrival {  // received for a group, and not yet used
    FdMessage message;
    SharedMemory memory;  // of a region
    std::string refusal;  // why there is no memory
  };
  struct Peer {
    UnixSocket socket;
    pid_t pid = 0;
    ProcessWatch watch;
    std::vector<Segment> segments;
    std::deque<Arrival> arrivals;
  };

  /// Whether `errno` says that CMA is forbidden, although it was allowed when the ranks connected.
  bool is_forbidden() const { return has_cma_ && (errno == EPERM || errno == ENOSYS); }
  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& of(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  std::vector<std::uint64_t> exchange(std::uint64_t word, const Deadline& deadline);
  bool probe_cma(const std::vector<std::uint64_t>& probes);
  bool send_segment(std::uint32_t number, const SharedMemory& segment);
  std::optional<UnixSocket::Packet> receive_now(int peer);
  bool receive_fd(int peer);
  SharedMemory make_region(std::span<const int> members, std::size_t nbytes, std::uint64_t number);
  SharedMemory send_region(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                           const Deadline& deadline);
  [[noreturn]] static void throw_lost(int peer);
  [[noreturn]] static void throw_late(int peer, const Deadline& deadline);
  std::optional<Arrival> take_arrival(int peer, std::uint64_t number);
  void announce(std::span<const int> members, const FdMessage& message, const Fd* fd, const Deadline& deadline) const;
  std::vector<int> gather(std::span<const int> members, std::uint64_t number, std::optional<SharedMemory>& memory,
                          const Deadline& deadline);
  void give_up(std::span<const int> members, std::uint64_t number);
  void forget(std::uint64_t number);
  static void see(Segment& segment, std::size_t offset, std::size_t nbytes);

  int rank_;
  const pid_t self_ = ::getpid();  // of this process: a child made by fork cannot use this object
  std::vector<Peer> peers_;
  bool has_cma_ = false;
  std::recursive_mutex mutex_;
  std::vector<std::uint64_t> given_up_;  // numbers under which no group will form
  std::shared_ptr<SharedHeap> heap_ = std::make_shared<SharedHeap>();
};

ProcessPeers::ProcessPeers(int rank, std::vector<Fd> links) : rank_(rank), peers_(links.size()) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    of(peer).socket = UnixSocket(std::move(links[static_cast<std::size_t>(peer)]));
    close_in_forks(of(peer).socket.fd().get());
    of(peer).pid = of(peer).socket.peer();
    of(peer).watch = ProcessWatch(of(peer).pid);
  }
}

void ProcessPeers::probe_all(const std::vector<std::uint64_t>& probes, const Deadline& deadline) {
  if (probes.size() != peers_.size()) throw Error("each rank of this host has one place to be probed");
  // Paths by CMA need both ends, and are chosen without asking the peer: so either all ranks have it or none.
  const std::vector<std::uint64_t> verdicts = exchange(probe_cma(probes) ? 1 : 0, deadline);
  has_cma_ = std::ranges::find(verdicts, std::uint64_t{0}) == verdicts.end();
}

/// The words of all ranks, by rank.
std::vector<std::uint64_t> ProcessPeers::exchange(std::uint64_t word, const Deadline& deadline) {
  std::vector<std::uint64_t> words(peers_.size(), word);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_ && !of(peer).socket.send(&word, sizeof word, nullptr, deadline)) throw_late(peer, deadline);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    std::optional<UnixSocket::Packet> packet;
    while (!(packet = receive_now(peer))) {
      if (deadline.passed()) throw_late(peer, deadline);
      of(peer).socket.wait_until_readable();
    }
    if (packet->bytes.size() != sizeof word) throw Error(str("rank ", peer, " runs another version of samestep"));
    std::memcpy(&words[static_cast<std::size_t>(peer)], packet->bytes.data(), sizeof word);
  }
  return words;
}

bool ProcessPeers::probe_cma(const std::vector<std::uint64_t>& probes) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    // Writes back what it has read: reading may be allowed and writing not. `has_cma_` is still false, so that a
    // refusal is not circumvented by /proc/<pid>/mem here.
    std::uint64_t word = ~std::uint64_t{0};
    const std::uint64_t address = probes[static_cast<std::size_t>(peer)];
    if (of(peer).pid == 0 || !read_peer(peer, &word, address, sizeof word)) return false;
    const RemoteSegment back{reinterpret_cast<std::byte*>(&word), address, sizeof word};
    if (word != address || !write_peer(peer, 0, {&back, 1})) return false;
  }
  return true;
}

bool ProcessPeers::ended(int peer) const {
  const Peer& p = of(peer);
  // The end of the connection is weaker evidence: children that the peer has made otherwise than by fork() keep it open
  // after the peer's end.
  // In another PID namespace there is nothing else, because the peer has no number here.
  return p.watch.ended() || (!p.watch.has_pidfd() && p.socket.at_end());
}

// ---- memory

bool ProcessPeers::send_segment(std::uint32_t number, const SharedMemory& segment) {
  const FdMessage message{FdMessage::Kind::segment, number};
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    try {
      // False: from now on the segment counts as not shared, for all peers (SharedHeap::publish). Those that have got
      // it never see an address in it.
      if (!of(peer).socket.send_now(&message, sizeof message, &segment.fd())) return false;
    } catch (const PeerLostError&) {  // the operation that waits for the peer reports it
    } catch (const UnavailableError&) {
      return false;
    }
  }
  return true;
}

std::optional<UnixSocket::Packet> ProcessPeers::receive_now(int peer) {
  try {
    return of(peer).socket.receive_now();
  } catch (const PeerLostError&) {
    throw_lost(peer);
  }
}

/// Takes the next packet of a peer. False if none has arrived. Requires the mutex, which nobody holds who waits for
/// one.
bool ProcessPeers::receive_fd(int peer) {
  using Kind = FdMessage::Kind;
  std::optional<UnixSocket::Packet> packet = receive_now(peer);
  if (!packet) return false;
  FdMessage message{};
  const std::size_t nbytes = packet->bytes.size();
  std::memcpy(&message, packet->bytes.data(), std::min(nbytes, sizeof message));
  const bool has_memory = message.kind == Kind::region || message.kind == Kind::segment;
  // The number of a segment determines the length of a table, so it is bounded.
  if (nbytes < sizeof message || message.kind > Kind::gone || has_memory != static_cast<bool>(packet->fd) ||
      (nbytes > sizeof message && message.kind != Kind::refusal) ||
      (message.kind == Kind::segment && message.number >= kMaxSegments)) {
    throw Error("an unknown packet came from a rank of this host");
  }
  if (message.kind != Kind::segment && std::ranges::find(given_up_, message.number) != given_up_.end()) return true;
  if (!has_memory) {
    const auto* const text = reinterpret_cast<const char*>(packet->bytes.data() + sizeof message);
    of(peer).arrivals.push_back({message, {}, std::string(text, nbytes - sizeof message)});
    return true;
  }
  SharedMemory memory = map_received(std::move(packet->fd));
  // The mapping alone keeps the memory. A descriptor for each segment of each peer would use up the limit of the
  // process.
  memory.close_fd();
  if (message.kind == Kind::region) {
    of(peer).arrivals.push_back({message, std::move(memory), {}});
  } else {
    std::vector<Segment>& segments = of(peer).segments;
    segments.resize(std::max<std::size_t>(segments.size(), message.number + 1));
    segments[message.number].memory = std::move(memory);
  }
  return true;
}

void ProcessPeers::throw_lost(int peer) {
  throw PeerLostError(str("rank ", peer,
                          " of this host has not shared its memory: its process has ended, or has failed with an error "
                          "of its own"));
}

void ProcessPeers::throw_late(int peer, const Deadline& deadline) {
  throw TimeoutError(
      str("rank ", peer, " of this host has not shared its memory after ", deadline.timeout().count(), " s"));
}

/// The first thing that has come from `peer` for a group. Throws if it is a refusal.
std::optional<ProcessPeers::Arrival> ProcessPeers::take_arrival(int peer, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  auto& arrivals = of(peer).arrivals;
  // What several threads wait for comes in one stream, with segments of the peer's heap in between. The peer may have
  // ended after the one that is wanted here.
  do {
    const auto is_wanted = [&](const Arrival& arrival) { return arrival.message.number == number; };
    const auto found = std::ranges::find_if(arrivals, is_wanted);
    if (found == arrivals.end()) continue;
    Arrival taken = std::move(*found);
    arrivals.erase(found);
    if (taken.message.kind == FdMessage::Kind::refusal) throw UnavailableError(taken.refusal);
    return taken;
  } while (receive_fd(peer));
  return std::nullopt;
}

/// Makes the memory of a group. The others, which wait for it, get the error if there is one.
SharedMemory ProcessPeers::make_region(std::span<const int> members, std::size_t nbytes, std::uint64_t number) {
  try {
    return SharedMemory::make("samestep", nbytes);
  } catch (const UnavailableError& error) {
    const std::string text = str(
        "rank ", rank_, " of this host cannot make the memory that its ranks share: ", error.what(), kWithoutSharing);
    const FdMessage message{FdMessage::Kind::refusal, number};
    std::string packet(reinterpret_cast<const char*>(&message), sizeof message);
    packet += text;
    for (const int peer : members) {
      try {
        if (peer != rank_) of(peer).socket.send_now(packet.data(), packet.size(), nullptr);
      } catch (const Error&) {  // it has ended, and waits for nothing
      }
    }
    throw UnavailableError(text);
  }
}

std::shared_ptr<std::byte> ProcessPeers::share(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                               const Deadline& deadline) {
  std::optional<SharedMemory> memory;
  if (const int owner = members.front(); owner == rank_) {
    memory = send_region(members, nbytes, number, deadline);
  } else {
    // The mutex is free while this thread waits. The owner may itself wait, in another thread, for what a second thread
    // of this rank will share; and the wait may take Python's lock, whose holder may want the mutex.
    std::optional<Arrival> arrival;
    while (!(arrival = take_arrival(owner, number))) {
      if (deadline.passed()) throw_late(owner, deadline);
      of(owner).socket.wait_until_readable();
    }
    memory = std::move(arrival->memory);
  }
  const auto kept = std::make_shared<SharedMemory>(std::move(*memory));
  return {kept, kept->data()};
}

/// Makes the memory of a group, and sends it to the other members.
SharedMemory ProcessPeers::send_region(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                       const Deadline& deadline) {
  SharedMemory memory = make_region(members, nbytes, number);
  announce(members, {FdMessage::Kind::region, number}, &memory.fd(), deadline);
  memory.close_fd();
  return memory;
}

void ProcessPeers::announce(std::span<const int> members, const FdMessage& message, const Fd* fd,
                            const Deadline& deadline) const {
  for (const int peer : members) {
    try {
      if (peer == rank_ || of(peer).socket.send(&message, sizeof message, fd, deadline)) continue;
    } catch (const PeerLostError&) {
      throw_lost(peer);
    }
    throw TimeoutError(str("rank ", peer, " of this host has not taken the memory that rank ", rank_,
                           " shares with it after ", deadline.timeout().count(), " s"));
  }
}

LocalPeers::Meeting ProcessPeers::meet(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                       const Deadline& deadline) {
  if (::getpid() != self_) {
    throw NotInitializedError(str("this process was forked from rank ", rank_,
                                  " of this host; only the original process can make groups; start more ranks with "
                                  "`samestep run`, mpirun or samestep.multiprocessing.spawn"));
  }
  std::optional<SharedMemory> memory;
  std::vector<int> absent;
  try {
    if (members.front() == rank_) {
      memory = send_region(members, nbytes, number, deadline);
    } else {
      announce(members, {FdMessage::Kind::here, number}, nullptr, deadline);
    }
    absent = gather(members, number, memory, deadline);
  } catch (...) {
    give_up(members, number);
    throw;
  }
  if (!absent.empty()) give_up(members, number);
  if (!absent.empty() || !memory) return {nullptr, std::move(absent)};
  const auto kept = std::make_shared<SharedMemory>(std::move(*memory));
  return {{kept, kept->data()}, {}};
}

/// Waits until all members have come. Returns those that have not at the deadline; `memory` is none if one of them has
/// given up.
std::vector<int> ProcessPeers::gather(std::span<const int> members, std::uint64_t number,
                                      std::optional<SharedMemory>& memory, const Deadline& deadline) {
  std::vector<int> absent(members.begin(), members.end());
  std::erase(absent, rank_);
  const Clock::time_point begin = Clock::now();
  for (bool warned = false; true;) {
    for (const int peer : members) {  // also those that have come: they may give up
      if (peer == rank_) continue;
      while (std::optional<Arrival> arrival = take_arrival(peer, number)) {
        if (arrival->message.kind == FdMessage::Kind::gone) {
          memory.reset();
          forget(number);
          return {};
        }
        if (arrival->memory) memory = std::move(arrival->memory);
        std::erase(absent, peer);
      }
    }
    if (absent.empty() || deadline.passed()) return absent;
    if (!warned && Seconds(Clock::now() - begin).count() > wait_hooks().warn_after_s) {
      warned = true;
      wait_hooks().warn(str("rank ", absent.front(), " of this host has not joined a new group: still waiting"));
    }
    of(absent.front()).socket.wait_until_readable();
  }
}

/// Lets the members that have come, or will come, look for each other under another number.
void ProcessPeers::give_up(std::span<const int> members, std::uint64_t number) {
  forget(number);
  const FdMessage message{FdMessage::Kind::gone, number};
  for (const int peer : members) {
    try {
      if (peer != rank_) of(peer).socket.send_now(&message, sizeof message);
    } catch (const Error&) {  // it has ended, and waits for nothing
    }
  }
}

void ProcessPeers::forget(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  given_up_.push_back(number);
  for (Peer& peer : peers_) {
    std::erase_if(peer.arrivals, [&](const Arrival& arrival) { return arrival.message.number == number; });
  }
}

std::uint64_t ProcessPeers::to_remote_address(const void* data, std::size_t nbytes) {
  const auto spot = heap_->find(data, nbytes);
  // The descriptor leaves before the address does: a peer that reads the address finds the descriptor in its socket.
  const auto give = [&](const SharedMemory& segment) { return send_segment(spot->segment, segment); };
  if (!spot || !heap_->publish(spot->segment, give)) return reinterpret_cast<std::uintptr_t>(data);
  return kSharedAddressBit | (static_cast<std::uint64_t>(spot->segment) << kOffsetBits) | spot->offset;
}

std::byte* ProcessPeers::map_peer_memory(int peer, std::uint64_t address, std::size_t nbytes) {
  if ((address & kSharedAddressBit) == 0) return nullptr;
  const std::size_t number = (address & ~kSharedAddressBit) >> kOffsetBits;
  const std::size_t offset = address & ((std::uint64_t{1} << kOffsetBits) - 1);
  const std::lock_guard lock(mutex_);
  std::vector<Segment>& segments = of(peer).segments;
  while (segments.size() <= number || !segments[number].memory) {
    // The peer sent the descriptor before it posted the address: what has not arrived by now never will.
    if (receive_fd(peer)) continue;
    throw UnavailableError(
        str("this rank could not open memory that rank ", peer, " of this host has shared with it", kWithoutSharing));
  }
  Segment& segment = segments[number];
  if (offset < segment.seen_from || offset + nbytes > segment.seen_to) see(segment, offset, nbytes);
  return segment.memory.data() + offset;
}

void ProcessPeers::see(Segment& segment, std::size_t offset, std::size_t nbytes) {
  // In the parts of the heap, all of whose pages exist: populating them allocates no memory.
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

std::uint64_t probe_address() {
  allow_memory_access();
  return reinterpret_cast<std::uintptr_t>(&probe);
}

std::shared_ptr<LocalPeers> open_process_peers(int rank, std::vector<Fd> links,
                                               const std::vector<std::uint64_t>& probes, const Deadline& deadline) {
  auto host = std::make_shared<ProcessPeers>(rank, std::move(links));
  host->probe_all(probes, deadline);
  return host;
}

}  // namespace samestep
