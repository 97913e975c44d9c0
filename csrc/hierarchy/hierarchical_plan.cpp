#include "hierarchy/hierarchical_plan.h"

#include <algorithm>

namespace samestep {
namespace {

constexpr std::size_t kRounding = 64;    // elements: chunks begin on cache lines
constexpr std::size_t kMinChunk = 1024;  // elements of a chunk; below, a message costs more than it saves

std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

HierarchicalPlan::HierarchicalPlan(const Topology& topology, CollectiveType verb, int root, std::size_t count,
                                   std::size_t piece, bool together)
    : topology_(&topology), verb_(verb), root_(root), count_(count) {
  if (count == 0) return;
  const auto n_hosts = static_cast<std::size_t>(topology.n_hosts()), lanes = static_cast<std::size_t>(topology.lanes());
  std::size_t n_ranks = 0;
  for (int host = 0; host < topology.n_hosts(); ++host) n_ranks += topology.ranks_on(host).size();
  // At least one chunk for each leader, and in an allreduce for each root host as well, so that all of them have work;
  // but none so short that its message costs more than it saves.
  const std::size_t turns = has_blocks() ? 1 : lanes * (verb == CollectiveType::allreduce && !together ? n_hosts : 1);
  const std::size_t fair = std::max(divide_up(count, turns), std::min(kMinChunk, piece));
  const std::size_t parts = divide_up(count, std::min(fair, piece));
  // Chunks of equal length, so that no leader has much less to do than the others.
  length_ = std::min(count, divide_up(divide_up(count, parts), kRounding) * kRounding);
  per_block_ = divide_up(count, length_);
  chunks_ = per_block_ * (has_blocks() ? n_ranks : 1);
}

HierarchicalChunk HierarchicalPlan::chunk(std::size_t number) const {
  HierarchicalChunk chunk;
  const std::size_t first = number % per_block_ * length_;
  chunk.count = std::min(length_, count_ - first);
  chunk.in_offset = chunk.out_offset = first;
  const auto block = static_cast<int>(number / per_block_);
  switch (verb_) {
    case CollectiveType::allreduce:
      chunk.root_host = static_cast<int>(number / static_cast<std::size_t>(topology_->lanes()) %
                                         static_cast<std::size_t>(topology_->n_hosts()));
      break;
    case CollectiveType::reduce:
      chunk.wanted_by = root_;
      chunk.root_host = topology_->host_of(root_);
      break;
    case CollectiveType::reduce_scatter:
      chunk.in_offset += static_cast<std::size_t>(block) * count_;
      chunk.wanted_by = block;
      chunk.root_host = topology_->host_of(block);
      break;
    case CollectiveType::allgather:
      chunk.out_offset += static_cast<std::size_t>(block) * count_;
      chunk.source = block;
      chunk.root_host = topology_->host_of(block);
      break;
    default:  // broadcast
      chunk.source = root_;
      chunk.root_host = topology_->host_of(root_);
  }
  return chunk;
}

int HierarchicalPlan::leader(std::size_t number, int host) const {
  const auto ranks = topology_->ranks_on(host);
  if (!has_blocks()) return ranks[number % static_cast<std::size_t>(topology_->lanes())];
  const auto owner = static_cast<int>(number / per_block_);
  // On its own host the owner does it, and so needs no other rank's access to its block. On other hosts the blocks of a
  // host are spread over the ranks.
  if (topology_->host_of(owner) == host) return owner;
  return ranks[static_cast<std::size_t>(topology_->local_index(owner)) % ranks.size()];
}

bool HierarchicalPlan::has_work(int rank) const {
  if (chunks_ == 0) return false;
  if (has_blocks()) return true;
  const auto index = static_cast<std::size_t>(topology_->local_index(rank));
  return index < static_cast<std::size_t>(topology_->lanes()) && index < chunks_;
}

}  // namespace samestep
