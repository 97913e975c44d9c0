#include "world.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../cpp/collective_calls.h"
#include "core/error.h"
#include "shm/shm_header_exchange.h"
#include "shm/shm_transport.h"
#include "values.h"
#include "waiting/yield_monitor.h"

namespace model {
namespace {

using namespace samestep;

class WatchedPeers final : public LocalPeers {
 public:
  /// `gate`: a word of the watched memory, 0 while it is open.
  WatchedPeers(int rank, int size, Reach reach, std::uint64_t gate)
      : rank_(rank), size_(size), reach_(reach), gate_(gate) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::shared_ptr<std::byte> share(std::span<const int>, std::size_t, std::uint64_t, const Deadline&) override {
    return {std::shared_ptr<void>(), explorer().memory().base()};
  }
  std::uint64_t to_remote_address(const void* data, std::size_t) override {
    return reinterpret_cast<std::uintptr_t>(data) | (reach_ == Reach::shared ? kSharedAddressBit : 0);
  }
  std::byte* map_peer_memory(int, std::uint64_t place, std::size_t) override {
    return (place & kSharedAddressBit) == 0 ? nullptr : reinterpret_cast<std::byte*>(place & ~kSharedAddressBit);
  }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool ended(int peer) const override {
    const std::size_t word = explorer().end_of(peer);
    explorer().before(Explorer::Kind::load, word, std::memory_order_acquire);
    explorer().loaded(word, std::memory_order_acquire);
    return explorer().is_dead(peer);
  }
  bool has_cma() const override { return reach_ != Reach::none; }
  using LocalPeers::read_peer;
  bool read_peer(int peer, std::span<const RemoteSegment> pieces) override {
    if (explorer().is_dead(peer)) return false;
    for (const RemoteSegment& piece : pieces) {
      std::memcpy(piece.local, reinterpret_cast<const void*>(piece.remote), piece.nbytes);
    }
    return true;
  }
  bool write_peer(int peer, std::uint64_t gate, std::span<const RemoteSegment> pieces) override {
    if (gate != 0 && word(gate).load(std::memory_order_acquire) != 0) return false;  // pairs with close_gate
    // What the kernel does is no single step: others come in between here.
    if (ended(peer)) return false;
    for (const RemoteSegment& piece : pieces)
      std::memcpy(reinterpret_cast<void*>(piece.remote), piece.local, piece.nbytes);
    return true;
  }
  std::uint64_t open_gate() override { return reach_ == Reach::cma ? gate_ : 0; }
  void close_gate(std::uint64_t gate) override {
    word(gate).store(1, std::memory_order_release);  // pairs with write_peer
  }
  void free_gate(std::uint64_t) override {}

 private:
  static std::atomic<std::uint64_t>& word(std::uint64_t gate) {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(gate);
  }

  int rank_, size_;
  Reach reach_;
  std::uint64_t gate_;
};

}  // namespace

void World::set_up() {
  ++execution_;
  used_ = ShmRegion::nbytes_for(size_);
  explorer().leave_out(ShmRegion::nbytes_of_event_counts(size_));
  yield_monitor(/*oversubscribed=*/true).disable_timing();
  members_.clear();
  for (int rank = 0; rank < size_; ++rank) {
    auto group = std::make_shared<NodeGroup>();
    group->rank = rank;
    group->peers = std::make_shared<WatchedPeers>(rank, size_, reach_,
                                                  reinterpret_cast<std::uintptr_t>(explorer().memory().base() + used_));
    used_ += 64;
    group->region = std::make_shared<ShmRegion>(group->peers->share({}, 0, 0, Deadline::after(Seconds(1))), size_);
    group->members.resize(static_cast<std::size_t>(size_));
    std::iota(group->members.begin(), group->members.end(), 0);
    group->fence = std::make_shared<WriteFence>(group->peers, group->members, static_cast<std::size_t>(rank),
                                                group->region->fence_words());
    auto header_exchange = std::make_unique<ShmHeaderExchange>(group->region, rank);
    group->header_exchange = header_exchange.get();
    ExchangeOptions options;
    options.oversubscribed = true;  // it backs off from the first poll on
    auto transport = std::make_unique<ShmTransport>(group->region, group->peers, group->members, rank);
    group->transport = transport.get();
    auto engine = std::make_shared<ProgressEngine>(std::move(transport), options, std::move(header_exchange));
    engine->set_on_leave([fence = group->fence](std::uint64_t) { fence->close(); });
    members_.push_back({engine, std::make_shared<NodeCommunicator>(engine, std::move(group)), {}});
  }
}

void World::tear_down() {
  for (Member& member : members_) {
    // To close makes what is pending progress, in memory that is not reset for the next execution.
    member.progress_engine->inbox_.abandon();
    member.progress_engine->collectives_.clear();
    member.progress_engine->pending_messages_.clear();
    member.progress_engine->close();
  }
  members_.clear();
}

Floats World::buffer(int rank, std::size_t count) {
  auto* const data = reinterpret_cast<float*>(explorer().memory().base() + used_);
  used_ += (count * sizeof(float) + 63) / 64 * 64;
  if (used_ + 64 > Memory::kNbytes) violated("the test needs more memory");
  member(rank).buffers.emplace_back(data, count);
  return member(rank).buffers.back();
}

Floats World::contribution(int rank, std::size_t count) {
  const Floats values = buffer(rank, count);
  fill(values, first_element(rank));
  return values;
}

void World::expect_sum(Floats values) const {
  float first = 0;
  for (int rank = 0; rank < size_; ++rank) first += first_element(rank);
  expect(values, first, static_cast<float>(size_));
}

void World::wait(int rank, const Communicator::WorkPtr& work, bool polls_failures) {
  explorer().end_bounded_loop();
  auto& operation = dynamic_cast<Operation&>(*work);
  while (!operation.done()) {
    if (polls_failures) engine(rank).poll_peer_failures();
    if (!operation.finished()) explorer().pause(false);
  }
  if (operation.error()) std::rethrow_exception(operation.error());
}

bool World::wait_or_leave(int rank, const Communicator::WorkPtr& work) {
  explorer().end_bounded_loop();
  auto& operation = dynamic_cast<Operation&>(*work);
  while (!operation.done()) {
    engine(rank).poll_peer_failures();
    if (operation.finished()) break;
    if (!explorer().pause(true)) continue;
    leave(rank);
    return false;
  }
  if (operation.error()) std::rethrow_exception(operation.error());
  return true;
}

void World::leave(int rank) {
  for (const Floats buffer : member(rank).buffers) {
    explorer().memory().withdraw(rank, buffer.data(), buffer.size_bytes());
  }
  engine(rank).abandon(std::make_exception_ptr(TimeoutError("its patience ended")), "its patience ended");
  // Shared buffers are withdrawn by the system, which is not explored.
  if (reach_ != Reach::cma) return;
  for (const Floats buffer : member(rank).buffers)
    explorer().memory().close_to_writes(rank, buffer.data(), buffer.size_bytes());
}

void World::forget_history(int rank, std::uint64_t place) {
  ProgressEngine& engine = *member(rank).progress_engine;
  const auto& header_exchange = dynamic_cast<const ShmHeaderExchange&>(engine.header_exchange());
  const auto& transport = dynamic_cast<const ShmTransport&>(engine.transport());
  const NodeGroup& group = *member(rank).group->group_;
  const bool idle = engine.is_idle() && engine.pending_messages_.empty() && transport.requests_.empty() &&
                    !transport.matcher_.has_unexpected() && transport.rts_sent_.empty() &&
                    transport.in_data_phase_.empty();
  const bool all_written = std::all_of(transport.outgoing_.begin(), transport.outgoing_.end(),
                                       [](const auto& queue) { return queue.empty(); });
  if (!idle || !all_written) return;
  std::uint64_t state = place;
  for (const std::uint64_t part :
       {engine.next_sequence_, header_exchange.posted_, header_exchange.released_, header_exchange.min_released_,
        header_exchange.n_blocks_, std::uint64_t(header_exchange.next_peer_), std::uint64_t(transport.next_id_)}) {
    state = mix(state, part);
  }
  for (const std::uint64_t user : header_exchange.block_users_) state = mix(state, user);
  for (const std::uint64_t n : group.next_chunk) state = mix(state, n);
  for (const std::uint64_t n : group.finished) state = mix(state, n);
  explorer().forget(state);
}

void World::all_reduce_inline(int rank, Floats in, Floats out) {
  if (const auto work =
          group(rank).run({CollectiveType::allreduce, as_buffer(in), as_buffer(out), {}, -1, shape_of(in)}))
    wait(rank, work);
}

Communicator::WorkPtr World::all_reduce(int rank, Floats in, Floats out) {
  return allreduce(group(rank), as_buffer(in), as_buffer(out), {}, shape_of(in));
}

}  // namespace model
