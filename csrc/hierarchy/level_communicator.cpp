#include "hierarchy/level_communicator.h"

#include <algorithm>
#include <map>

#include "communicator/checks.h"
#include "core/error.h"
#include "exchange/short_reduction.h"
#include "hierarchy/level_halving.h"
#include "hierarchy/level_work.h"
#include "node/node_communicator.h"
#include "node/shared_heap.h"

namespace samestep {
namespace {

/// Do the bits of this reduction depend on the order of the terms?
bool order_matters(DType dtype, ReduceOp op) {
  const bool adds = op == ReduceOp::sum || op == ReduceOp::prod || op == ReduceOp::avg || op == ReduceOp::premul;
  return adds && (is_floating(dtype) || is_complex(dtype));
}

std::shared_ptr<std::byte> share_marks(const LevelGroup& group, const Deadline& deadline) {
  if (group.host == nullptr || group.neighbours().size() == 1) return nullptr;
  std::vector<int> members;
  for (const int rank : group.neighbours()) members.push_back(group.seats.seat(rank).on_host);
  return group.host->share(members, Marks::nbytes_for(members.size()), deadline);
}

}  // namespace

std::shared_ptr<LevelCommunicator> LevelCommunicator::open(std::unique_ptr<Messenger> messenger,
                                                           std::vector<Seat> seats, std::shared_ptr<Host> host,
                                                           ExchangeOptions options, const Deadline& deadline) {
  auto engine = std::make_shared<Engine>(std::move(messenger), std::move(options));
  return over(std::move(engine), std::move(seats), std::move(host), deadline);
}

std::shared_ptr<LevelCommunicator> LevelCommunicator::over(std::shared_ptr<Engine> engine, std::vector<Seat> seats,
                                                           std::shared_ptr<Host> host, const Deadline& deadline) {
  auto group = std::make_shared<LevelGroup>(Seats(std::move(seats)), engine->rank());
  group->host = std::move(host);
  group->marks = share_marks(*group, deadline);
  const auto place = static_cast<std::size_t>(group->seats.place_of(group->rank));
  Marks marks(group->marks, group->neighbours().size(), place);
  // The others must not touch the memory of a rank that has left.
  engine->when_leaving([marks](std::uint64_t first_missing) mutable { marks.leave(first_missing); });
  return std::make_shared<LevelCommunicator>(std::move(engine), std::move(group));
}

std::shared_ptr<Communicator> LevelCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                            const Deadline& deadline) {
  std::vector<Seat> seats;
  std::vector<int> on_host;
  for (const int rank : ranks) {
    seats.push_back(group_->seats.seat(rank));
    on_host.push_back(seats.back().on_host);
  }
  const auto same_host = [&](const Seat& seat) { return seat.host == seats[0].host; };
  if (seats.size() > 1 && std::all_of(seats.begin(), seats.end(), same_host)) {
    return NodeCommunicator::open(group_->host, std::move(on_host), std::move(options), deadline);
  }
  auto messenger = shared_engine().messenger().subset_with(ranks, options.number);
  return open(std::move(messenger), std::move(seats), group_->host, std::move(options), deadline);
}

std::shared_ptr<SharedHeap> LevelCommunicator::heap() const { return group_->host ? group_->host->heap() : nullptr; }

std::shared_ptr<std::byte> LevelCommunicator::allocate_shared(std::size_t nbytes) {
  return group_->host ? samestep::allocate_shared(group_->host->heap(), nbytes) : nullptr;
}

Communicator::WorkPtr LevelCommunicator::reduction(const Signature& signature, ConstBuffer in, Buffer out,
                                                   const Reduction& reduction, std::size_t nbytes) {
  const bool by_host = !group_->seats.keeps_order() && order_matters(in.dtype, reduction.op);
  const bool is_short = !by_host && ShortReduction::fits(shared_engine(), signature.verb, nbytes);
  if (is_short || !HalvingRun::carries(in.dtype, reduction.op)) {
    return ExchangeCommunicator::reduction(signature, in, out, reduction, nbytes);
  }
  const int n_hosts = group_->seats.n_hosts();
  const std::size_t of_lane = nbytes / static_cast<std::size_t>(group_->seats.lanes());
  const Way way = shared_engine().options().way.value_or(cheapest_way(n_hosts, of_lane));
  if (signature.verb != Verb::all_reduce || way == Way::direct || n_hosts == 1) {
    return start<LevelWork>(signature, group_, in, out, reduction);
  }
  return start<LevelHalving>(signature, group_, in, out, reduction, way == Way::halving);
}

Communicator::WorkPtr LevelCommunicator::long_broadcast(const Signature& signature, Buffer buffer) {
  return start<LevelWork>(signature, group_, buffer, buffer, Reduction{});
}

Communicator::WorkPtr LevelCommunicator::all_gather(ConstBuffer in, Buffer out, const Shape& shape) {
  const Call call{Verb::all_gather, in, out, {}, -1, shape};
  checks::arguments(call, rank(), size());
  const std::size_t few = Movement::short_nbytes(shared_engine(), Verb::all_gather);
  if (in.nbytes() <= few) return ExchangeCommunicator::all_gather(in, out, shape);
  return start<LevelWork>(call.signature(), group_, in, out, Reduction{});
}

std::shared_ptr<Communicator> open_levels(Communicator& flat, const std::vector<int>& hosts, std::shared_ptr<Host> host,
                                          const Deadline& deadline) {
  auto* const exchange = dynamic_cast<ExchangeCommunicator*>(&flat);
  if (exchange == nullptr) throw InvalidArgumentError("open_levels: this group sends no messages");
  std::map<int, int> met;
  std::vector<Seat> seats;
  for (const int number : hosts) seats.push_back({number, met[number]++});
  return LevelCommunicator::over(exchange->engine_of_group(), std::move(seats), std::move(host), deadline);
}

}  // namespace samestep
