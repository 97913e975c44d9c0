#include "town.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "exchange/turns.h"
#include "node/line_meeting.h"
#include "node/mailbox.h"
#include "values.h"

namespace model {
namespace {

using namespace samestep;

class WatchedHost final : public Host {
 public:
  WatchedHost(int rank, int size, Reach reach) : rank_(rank), size_(size), reach_(reach) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::shared_ptr<std::byte> share(std::span<const int>, std::size_t, const Deadline&) override {
    return {std::shared_ptr<void>(), explorer().memory().base()};
  }
  std::uint64_t place_of(const void* data, std::size_t) override {
    return reinterpret_cast<std::uintptr_t>(data) | (reach_ == Reach::shared ? kShared : 0);
  }
  std::byte* at(int, std::uint64_t place, std::size_t) override {
    return (place & kShared) == 0 ? nullptr : reinterpret_cast<std::byte*>(place & ~kShared);
  }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool ended(int peer) const override {
    const std::size_t word = explorer().end_of(peer);
    explorer().before(Explorer::Kind::load, word, std::memory_order_acquire);
    explorer().loaded(word, std::memory_order_acquire);
    return explorer().is_dead(peer);
  }
  bool reaches_memory() const override { return reach_ != Reach::none; }
  using Host::pull;
  using Host::push;
  bool pull(int peer, std::span<const Piece> pieces) override {
    if (explorer().is_dead(peer)) return false;
    for (const Piece& piece : pieces) {
      std::memcpy(piece.mine, reinterpret_cast<const void*>(piece.theirs), piece.nbytes);
    }
    return true;
  }
  bool push(int peer, std::span<const Piece> pieces) override {
    if (explorer().is_dead(peer)) return false;
    for (const Piece& piece : pieces) std::memcpy(reinterpret_cast<void*>(piece.theirs), piece.mine, piece.nbytes);
    return true;
  }

 private:
  int rank_, size_;
  Reach reach_;
};

}  // namespace

void Town::set_up() {
  ++execution_;
  used_ = Arena::nbytes_for(size_);
  explorer().leave_out(Arena::nbytes_of_bells(size_));
  turns_of_short_calls().take_no_times();
  members_.clear();
  for (int rank = 0; rank < size_; ++rank) {
    auto group = std::make_shared<NodeGroup>();
    group->rank = rank;
    group->host = std::make_shared<WatchedHost>(rank, size_, reach_);
    group->arena = std::make_shared<Arena>(group->host->share({}, 0, Deadline::after(Seconds(1))), size_);
    group->members.resize(static_cast<std::size_t>(size_));
    std::iota(group->members.begin(), group->members.end(), 0);
    auto meeting = std::make_unique<LineMeeting>(group->arena, rank);
    group->meeting = meeting.get();
    ExchangeOptions options;
    options.oversubscribed = true;  // it pauses from the first poll on
    auto mailbox = std::make_unique<Mailbox>(group->arena, group->host, group->members, rank);
    group->mailbox = mailbox.get();
    auto engine = std::make_shared<Engine>(std::move(mailbox), options, std::move(meeting));
    members_.push_back({engine, std::make_shared<NodeCommunicator>(engine, std::move(group)), {}});
  }
}

void Town::tear_down() {
  for (Member& member : members_) member.engine->close();
  members_.clear();
}

Floats Town::buffer(int rank, std::size_t count) {
  auto* const data = reinterpret_cast<float*>(explorer().memory().base() + used_);
  used_ += (count * sizeof(float) + 63) / 64 * 64;
  if (used_ + 64 > Memory::kNbytes) violated("the test needs more memory");
  member(rank).buffers.emplace_back(data, count);
  return member(rank).buffers.back();
}

Floats Town::contribution(int rank, std::size_t count) {
  const Floats values = buffer(rank, count);
  fill(values, first_element(rank));
  return values;
}

void Town::expect_sum(Floats values) const {
  float first = 0;
  for (int rank = 0; rank < size_; ++rank) first += first_element(rank);
  expect(values, first, static_cast<float>(size_));
}

void Town::wait(int rank, const Communicator::WorkPtr& work, bool farewells) {
  explorer().end_bounded_loop();
  auto& operation = dynamic_cast<Operation&>(*work);
  while (!operation.done()) {
    if (farewells) engine(rank).look_for_farewells();
    if (!operation.finished()) explorer().pause(false);
  }
  if (operation.error()) std::rethrow_exception(operation.error());
}

bool Town::wait_or_give_up(int rank, const Communicator::WorkPtr& work) {
  explorer().end_bounded_loop();
  auto& operation = dynamic_cast<Operation&>(*work);
  while (!operation.done()) {
    engine(rank).look_for_farewells();
    if (operation.finished()) break;
    if (!explorer().pause(true)) continue;
    give_up(rank);
    return false;
  }
  if (operation.error()) std::rethrow_exception(operation.error());
  return true;
}

void Town::give_up(int rank) {
  for (const Floats buffer : member(rank).buffers) {
    explorer().memory().withdraw(rank, buffer.data(), buffer.size_bytes());
  }
  engine(rank).abandon(std::make_exception_ptr(TimeoutError("its patience ended")), "its patience ended");
}

void Town::settle(int rank, std::uint64_t place) {
  Engine& engine = *member(rank).engine;
  const auto& meeting = dynamic_cast<const LineMeeting&>(engine.meeting());
  const auto& mailbox = dynamic_cast<const Mailbox&>(engine.messenger());
  const NodeGroup& group = *member(rank).group->group_;
  const bool idle = engine.idle() && engine.messages_under_way_.empty() && mailbox.records_.empty() &&
                    mailbox.arrived_.empty() && mailbox.offered_.empty() && mailbox.in_pieces_.empty();
  const bool all_written =
      std::all_of(mailbox.outgoing_.begin(), mailbox.outgoing_.end(), [](const auto& queue) { return queue.empty(); });
  if (!idle || !all_written) return;
  std::uint64_t state = place;
  for (const std::uint64_t part :
       {engine.next_sequence_, meeting.announced_, meeting.released_, meeting.released_by_all_, meeting.n_blocks_,
        std::uint64_t(meeting.scanned_), std::uint64_t(mailbox.next_id_)}) {
    state = mix(state, part);
  }
  for (const std::uint64_t user : meeting.users_) state = mix(state, user);
  for (const std::uint64_t n : group.claimed) state = mix(state, n);
  for (const std::uint64_t n : group.finished) state = mix(state, n);
  explorer().forget(state);
}

void Town::all_reduce_now(int rank, Floats in, Floats out) {
  if (const auto work = group(rank).now({Verb::all_reduce, as_buffer(in), as_buffer(out), {}, -1, shape_of(in)}))
    wait(rank, work);
}

Communicator::WorkPtr Town::all_reduce(int rank, Floats in, Floats out) {
  return group(rank).all_reduce(as_buffer(in), as_buffer(out), {}, shape_of(in));
}

}  // namespace model
