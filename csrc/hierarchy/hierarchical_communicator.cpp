#include "hierarchy/hierarchical_communicator.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "collectives/one_shot_reduction.h"
#include "collectives/select_algorithm.h"
#include "core/error.h"
#include "hierarchy/hierarchical_collective.h"
#include "hierarchy/hierarchical_recursive.h"
#include "node/node_communicator.h"

namespace samestep {
namespace {

/// Whether the bits of this reduction depend on the order of the terms.
bool order_matters(DType dtype, ReduceOp op) {
  const bool adds = op == ReduceOp::sum || op == ReduceOp::prod || divides(op) || multiplies(op);
  return adds && (is_floating(dtype) || is_complex(dtype));
}

/// The fence of the ranks of a group on this host.
void make_fence(HierarchicalGroup& group, const Deadline& deadline) {
  if (group.peers == nullptr || group.local_ranks().size() == 1) return;
  std::vector<int> members;
  // LocalPeers numbers the ranks of the host, not those of the group.
  for (const int rank : group.local_ranks()) members.push_back(group.topology.location(rank).local_rank);
  auto words = group.peers->share(members, WriteFence::nbytes_for(members.size()), group.numbers.own(), deadline);
  const auto index = static_cast<std::size_t>(group.topology.local_index(group.rank));
  group.fence = std::make_shared<WriteFence>(group.peers, std::move(members), index, std::move(words));
}

}  // namespace

std::shared_ptr<HierarchicalCommunicator> HierarchicalCommunicator::over(std::shared_ptr<ProgressEngine> engine,
                                                                         std::vector<RankLocation> topology,
                                                                         std::shared_ptr<LocalPeers> host,
                                                                         const Deadline& deadline,
                                                                         std::uint64_t number) {
  auto group = std::make_shared<HierarchicalGroup>(Topology(std::move(topology)), engine->rank(), number);
  group->peers = std::move(host);
  make_fence(*group, deadline);
  // Other ranks must not access the memory of a rank that has left.
  engine->set_on_leave([fence = group->fence](std::uint64_t first_absent) {
    if (fence == nullptr) return;
    fence->leave(first_absent);
    fence->close();
  });
  return std::make_shared<HierarchicalCommunicator>(std::move(engine), std::move(group));
}

std::shared_ptr<Communicator> HierarchicalCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                                   const Deadline& deadline) {
  std::vector<RankLocation> topology;
  std::vector<int> local_ranks;
  for (const int rank : ranks) {
    topology.push_back(group_->topology.location(rank));
    local_ranks.push_back(topology.back().local_rank);
  }
  // A transport is not thread-safe, and threads that wait in this group use it. Not held where ranks of a host wait for
  // each other.
  std::unique_lock lock(shared_engine().mutex());
  const std::uint64_t number = group_->numbers.next(ranks);
  const auto same_host = [&](const RankLocation& location) { return location.host == topology[0].host; };
  // Ranks of one host need no transport between hosts.
  if (topology.size() > 1 && std::all_of(topology.begin(), topology.end(), same_host)) {
    lock.unlock();
    return NodeCommunicator::open(group_->peers, std::move(local_ranks), std::move(options), deadline, number);
  }
  auto transport = shared_engine().transport().subset(ranks, options.id);
  lock.unlock();
  auto engine = std::make_shared<ProgressEngine>(std::move(transport), std::move(options));
  return over(std::move(engine), std::move(topology), group_->peers, deadline, number);
}

Communicator::WorkPtr HierarchicalCommunicator::start_collective(const CollectiveArgs& args) {
  const bool is_long_allgather =
      args.type == CollectiveType::allgather &&
      args.in.nbytes() > PairwiseExchange::max_inline_bytes(shared_engine(), CollectiveType::allgather);
  return is_long_allgather ? start_operation<HierarchicalCollective>(args, group_)
                           : ExchangeCommunicator::start_collective(args);
}

Communicator::WorkPtr HierarchicalCommunicator::start_reduction(const CollectiveArgs& args) {
  const ReduceOp op = args.reduction.op;
  const std::size_t nbytes = nbytes_to_peer(args);
  // One-shot reductions add in order of rank. Unless all hosts have the same power of two of consecutive ranks, long
  // ones add in another order. Then short ones are done like long ones, so that the bits do not depend on the length.
  const bool by_host = !group_->topology.keeps_order() && order_matters(args.in.dtype, op);
  const bool is_one_shot = !by_host && OneShotReduction::fits(shared_engine(), args.type, nbytes);
  // Sums of half types and averages of integers are rounded once, from the elements of all ranks: partial sums of hosts
  // would be rounded before.
  if (is_one_shot || !RecursiveRun::supports(args.in.dtype, op)) return ExchangeCommunicator::start_reduction(args);
  const int n_hosts = group_->topology.n_hosts();
  // Each lane is an allreduce between hosts of its part of the elements.
  const std::size_t of_lane = nbytes / static_cast<std::size_t>(group_->topology.lanes());
  const Algorithm algorithm = shared_engine().options().algorithm.value_or(select_algorithm(n_hosts, of_lane));
  if (args.type != CollectiveType::allreduce || algorithm == Algorithm::two_shot || n_hosts == 1) {
    return start_operation<HierarchicalCollective>(args, group_);
  }
  return start_operation<HierarchicalRecursiveAllreduce>(args, group_, algorithm == Algorithm::recursive_halving);
}

Communicator::WorkPtr HierarchicalCommunicator::start_long_bcast(const CollectiveArgs& args) {
  // Root reads the buffer and all others write it, so the plan takes it as input and as output.
  CollectiveArgs both = args;
  both.in = args.out;
  return start_operation<HierarchicalCollective>(both, group_);
}

std::shared_ptr<Communicator> open_hierarchical(ExchangeCommunicator& flat, const std::vector<int>& hosts,
                                                std::shared_ptr<LocalPeers> host, const Deadline& deadline) {
  std::map<int, int> n_ranks;
  std::vector<RankLocation> topology;
  for (const int number : hosts) topology.push_back({number, n_ranks[number]++});
  return HierarchicalCommunicator::over(flat.engine_of_group(), std::move(topology), std::move(host), deadline);
}

}  // namespace samestep
