#include "collectives/exchange_communicator.h"

#include <algorithm>
#include <mutex>

#include "collectives/one_shot_reduction.h"
#include "collectives/recursive_halving.h"
#include "collectives/select_algorithm.h"
#include "collectives/two_shot_reduction.h"
#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "engine/group_creation.h"

namespace samestep {
namespace {

template <class T>
auto* bytes(T* data) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<Byte*>(data);
}

}  // namespace

ExchangeCommunicator::ExchangeCommunicator(std::unique_ptr<Transport> transport, ExchangeOptions options)
    : ExchangeCommunicator(std::make_shared<ProgressEngine>(std::move(transport), std::move(options))) {}

ExchangeCommunicator::ExchangeCommunicator(std::shared_ptr<ProgressEngine> engine, std::string_view transport)
    : Communicator({engine->rank(), engine->size(), engine->name(), transport, engine->options().oversubscribed,
                    PairwiseExchange::max_inline_bytes(*engine, CollectiveType::bcast)}),
      engine_(std::move(engine)) {
  engine_->join_family();
}

Communicator::WorkPtr ExchangeCommunicator::start_collective(const CollectiveArgs& args) {
  if (args.type == CollectiveType::reduce && rank() != args.root) {
    // `out` of a rank that gets no result is ignored and may have any length. The plans of all ranks must be equal, so
    // it gets the length of the result here.
    CollectiveArgs nothing_written = args;
    nothing_written.out = {nullptr, args.in.count, args.in.dtype};
    return start_reduction(nothing_written);
  }
  if (reduces(args.type)) return start_reduction(args);
  if (args.type == CollectiveType::bcast && args.out.nbytes() > max_inline()) return start_long_bcast(args);
  return start_transfers(args);
}

Communicator::WorkPtr ExchangeCommunicator::start_reduction(const CollectiveArgs& args) {
  const std::size_t nbytes = nbytes_to_peer(args);
  if (OneShotReduction::fits(*engine_, args.type, nbytes)) return start_operation<OneShotReduction>(args);
  const Algorithm algorithm = engine_->options().algorithm.value_or(select_algorithm(size(), nbytes));
  // Reduce and reduce_scatter stay with the two-shot algorithm, as do types whose partial sums would be rounded more
  // than once.
  const bool can_halve =
      args.type == CollectiveType::allreduce && size() > 1 && RecursiveRun::supports(args.in.dtype, args.reduction.op);
  if (!can_halve || algorithm == Algorithm::two_shot) return start_operation<TwoShotReduction>(args);
  return start_operation<RecursiveHalvingAllreduce>(args, algorithm == Algorithm::recursive_halving);
}

Communicator::WorkPtr ExchangeCommunicator::start_long_bcast(const CollectiveArgs& args) {
  // Two-shot with root as the only contributor: root sends each rank a chunk, which that rank distributes. So root
  // sends less than two buffers, not one to each rank.
  return start_operation<TwoShotReduction>(args);
}

Communicator::WorkPtr ExchangeCommunicator::start_transfers(const CollectiveArgs& args) {
  std::vector<PeerTransfer> transfers = no_transfers();
  plan_transfers(args, rank(), transfers);
  return start_exchange(args.signature(), std::move(transfers));
}

Communicator::WorkPtr ExchangeCommunicator::start_recv(const RecvArgs& args) {
  if (args.fit == Fit::probe) return start_operation<Probe>(args);
  return start_operation<Receive>(args);
}

std::shared_ptr<Communicator> ExchangeCommunicator::make_child(std::span<const int> ranks, const std::string& called,
                                                               std::uint32_t number, const Deadline& deadline) {
  ExchangeOptions options = engine_->options();
  options.name = called;
  options.id = number;
  if (called != name()) {  // else it takes the place of this group
    options.world_ranks.clear();
    for (const int rank : ranks) options.world_ranks.push_back(engine_->departures().world_rank(rank));
  }
  if (!options.hosts.empty()) {
    options.hosts.clear();
    for (const int rank : ranks) options.hosts.push_back(engine_->options().hosts[static_cast<std::size_t>(rank)]);
  }
  std::shared_ptr<Communicator> child;
  std::exception_ptr failed;
  try {
    child = make_child(ranks, std::move(options), deadline);
  } catch (const std::exception&) {
    failed = std::current_exception();
  }
  confirm_child(ranks, called, failed, deadline);
  return child;
}

void ExchangeCommunicator::confirm_child(std::span<const int> ranks, const std::string& called,
                                         const std::exception_ptr& failed, const Deadline& deadline) {
  // Otherwise those that have made the group would wait in it for a rank that lacks memory or descriptors.
  const auto call = make_operation<GroupCreation>(std::vector<int>(ranks.begin(), ranks.end()),
                                                  failed ? reason_of(failed) : std::string());
  engine_->start(call);
  try {
    call->wait(deadline);
  } catch (const Error&) {
    if (failed) std::rethrow_exception(failed);
    throw;
  }
  if (failed && (is_a<TimeoutError>(failed) || is_a<PeerLostError>(failed))) std::rethrow_exception(failed);
  const std::string failure = call->failure();
  if (failure.empty()) return;
  throw UnavailableError(str(call->describe(), ": group '", called, "' cannot be made by ", failure));
}

std::shared_ptr<Communicator> ExchangeCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                               const Deadline&) {
  // A transport is not thread-safe, and threads that wait in this group use it.
  const std::lock_guard lock(engine_->mutex());
  return std::make_shared<ExchangeCommunicator>(engine_->transport().subset(ranks, options.id), options);
}

std::uint32_t ExchangeCommunicator::reserve_group_id() const {
  const std::lock_guard lock(engine_->mutex());
  return engine_->transport().reserve_group_id();
}

void ExchangeCommunicator::meet_or_abandon(Work& work, const Deadline& deadline) {
  try {
    work.wait(deadline);
  } catch (const TimeoutError& error) {
    engine_->abandon(std::current_exception(), error.what());
    throw;
  }
}

std::shared_ptr<Communicator> ExchangeCommunicator::split(int color, int key, const Deadline& deadline,
                                                          const std::string& called) {
  struct Entry {
    int color, key;
    std::uint32_t number;
  };
  // Also on ranks that will be in no group: `split` is one exchange for all colors, and no rank knows the others' yet.
  const Entry mine{color, key, reserve_group_id()};
  std::vector<Entry> entries(static_cast<std::size_t>(size()));
  std::vector<PeerTransfer> transfers = no_transfers();
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    transfers[i] = {bytes(&mine), sizeof mine, bytes(&entries[i]), sizeof mine};
  }
  meet_or_abandon(*start_operation<PairwiseExchange>(
                      Signature{CollectiveType::make_group, DType::uint8, ReduceOp::sum, -1, {}}, std::move(transfers)),
                  deadline);
  // Before ranks without a group return: `children_` must stay equal on all ranks, because later default names contain
  // it. relaxed: see there.
  const int split = children_.fetch_add(1, std::memory_order_relaxed);
  const std::string text = called.empty() ? str(name(), "/split ", split, " color ", color) : called;
  if (color < 0) return nullptr;
  std::vector<int> members;
  std::uint32_t group_number = 0;
  for (int rank = 0; rank < size(); ++rank) {
    const Entry& entry = entries[static_cast<std::size_t>(rank)];
    if (entry.color != color) continue;
    members.push_back(rank);
    group_number = std::max(group_number, entry.number);
  }
  // By key, and by rank where keys are equal, as MPI_Comm_split orders them.
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return entries[static_cast<std::size_t>(a)].key < entries[static_cast<std::size_t>(b)].key;
  });
  return make_child(members, text, group_number, deadline);
}

std::shared_ptr<Communicator> ExchangeCommunicator::group(std::span<const int> ranks, const Deadline& deadline,
                                                          const std::string& called) {
  std::string list;
  std::vector<bool> seen(static_cast<std::size_t>(size()));
  for (const int rank : ranks) {
    checks::peer_in_group("group", "rank", rank, size());
    if (seen[static_cast<std::size_t>(rank)]) throw InvalidArgumentError(str("group: rank ", rank, " is listed twice"));
    seen[static_cast<std::size_t>(rank)] = true;
    list += str(list.empty() ? "" : ",", rank);
  }
  if (!seen[static_cast<std::size_t>(rank())]) {
    throw InvalidArgumentError(str("group: called by rank ", rank(), ", which is not among its ranks ", list));
  }
  engine_->require_usable();
  const auto call = make_operation<GroupCreation>(std::vector<int>(ranks.begin(), ranks.end()));
  engine_->start(call);
  call->wait(deadline);
  return make_child(ranks, called.empty() ? str(name(), "/group ", list) : called, call->group_id(), deadline);
}

void ExchangeCommunicator::close(const Deadline& deadline) {
  if (engine_->usable()) {
    try {
      // Peers may still need this rank in the collectives that it has started. The exchange without data is the barrier
      // that ProgressEngine::close requires: after it no rank works for this group any more.
      engine_->finish_collectives(deadline);
      start_operation<PairwiseExchange>(Signature{CollectiveType::close, DType::uint8, ReduceOp::sum, -1, {}},
                                        no_transfers())
          ->wait(deadline);
    } catch (const TimeoutError& error) {
      engine_->abandon(std::current_exception(), error.what());
      if (deadline.passed()) throw;
      throw PeerLostError(error.what(), error.named());  // a peer has left the group: this rank is not late
    } catch (const Error& error) {                       // peers must not wait for this rank
      engine_->abandon(std::current_exception(), error.what());
      throw;
    }
  }
  engine_->close();
}

bool ExchangeCommunicator::usable() const {
  const std::lock_guard lock(engine_->mutex());
  return engine_->usable();
}

Communicator::Counters ExchangeCommunicator::counters() const {
  const std::lock_guard lock(engine_->mutex());
  return {engine_->operations_started(), engine_->messages(), engine_->bytes(), engine_->next_sequence()};
}

}  // namespace samestep
