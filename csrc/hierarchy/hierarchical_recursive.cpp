#include "hierarchy/hierarchical_recursive.h"

#include <algorithm>
#include <utility>

#include "collectives/recursive_halving.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kOpenChunks = 4;
constexpr std::size_t kRecursiveStep =
    64 << 10;  // bytes of each rank that are reduced at a time, so that they stay in the cache

HierarchicalPlan plan_for(const ProgressEngine& engine, const HierarchicalGroup& group, const CollectiveArgs& args,
                          bool scatter_first) {
  // Hosts take the place of ranks: each finishes one part of a chunk.
  const std::size_t segment_bytes =
      RecursiveHalvingAllreduce::segment_nbytes(group.topology.n_hosts(), engine.options().segment_bytes);
  const std::size_t piece =
      scatter_first ? std::max<std::size_t>(1, segment_bytes / itemsize(args.in.dtype)) : SIZE_MAX;
  return HierarchicalPlan(group.topology, args.type, args.root, args.in.count, piece, /*together=*/true);
}

}  // namespace

HierarchicalRecursiveAllreduce::HierarchicalRecursiveAllreduce(std::shared_ptr<ProgressEngine> shared_engine,
                                                               const CollectiveArgs& args,
                                                               std::shared_ptr<HierarchicalGroup> group,
                                                               bool scatter_first)
    : HierarchicalCollective(shared_engine, args, group, plan_for(*shared_engine, *group, args, scatter_first)),
      scatter_first_(scatter_first) {}

const std::byte* HierarchicalRecursiveAllreduce::local_sum(const HierarchicalChunk& chunk, std::byte* into) {
  if (group_->local_ranks().size() == 1 && !multiplies(reduction_.op)) {
    return static_cast<const std::byte*>(in_.data) + chunk.in_offset * itemsize_;
  }
  // In steps, because `local_inputs` copies what it cannot map: the copies of a step stay in the cache until they are
  // reduced.
  HierarchicalChunk part = chunk;
  const std::size_t most = std::max<std::size_t>(kRecursiveStep / itemsize_, 1);
  for (std::size_t first = 0; first < chunk.count; first += most) {
    part.in_offset = chunk.in_offset + first;
    part.count = std::min(most, chunk.count - first);
    reduce_locally(0, part.count, local_inputs(part), into + first * itemsize_);
  }
  return into;
}

void HierarchicalRecursiveAllreduce::open_next() {
  const std::size_t number = mine_[next_++];
  const HierarchicalChunk chunk = plan_.chunk(number);
  std::vector<int> leaders;
  for (int host = 0; host < group_->topology.n_hosts(); ++host) leaders.push_back(plan_.leader(number, host));
  RecursivePlan steps(group_->topology.n_hosts(), group_->own_host(), {0, chunk.count}, scatter_first_);
  const std::size_t sum_nbytes = (bytes_of(chunk) + 63) / 64 * 64;
  Scratch::Block block = engine().scratch().take(sum_nbytes + steps.room() * itemsize_);
  std::byte* const room = block.data.get();
  const std::byte* const sum = local_sum(chunk, room);
  RecursiveRun::Params terms;
  terms.dtype = in_.dtype;
  // Leaders have multiplied their host's elements. An average divides by the number of ranks, not of hosts.
  terms.op = after_factors(reduction_.op);
  terms.divisor = reduction_.divisor_of(size());
  terms.ranks = leaders;
  terms.first_tag = tags::of_operation(sequence_, 0);
  terms.piece = engine().options().segment_bytes;
  std::byte* const out = static_cast<std::byte*>(out_.data) + chunk.out_offset * itemsize_;
  RecursiveRun run(engine(), std::move(steps), terms, sum, out, room + sum_nbytes);
  open_.push_back({chunk, std::move(leaders), std::move(block), std::move(run)});
}

bool HierarchicalRecursiveAllreduce::work_on_chunks() {
  while (true) {
    while (next_ < mine_.size() && open_.size() < kOpenChunks) open_next();
    if (open_.empty()) return true;
    if (!advance_first(engine(), open_)) return false;
    Open& first = open_.front();
    // The run has stored the result into this rank's output, from where the other ranks of the host get it.
    const std::byte* const result = static_cast<const std::byte*>(out_.data) + first.chunk.out_offset * itemsize_;
    write_to_local_ranks(first.chunk, result, /*to_shared_too=*/true);
    engine().scratch().release(std::move(first.block));
    open_.pop_front();
  }
}

std::vector<int> HierarchicalRecursiveAllreduce::pending_chunk_peers() {
  return open_.empty() ? std::vector<int>{} : open_.front().run.pending_peers(engine());
}

void HierarchicalRecursiveAllreduce::abort() {
  HierarchicalCollective::abort();
  for (Open& open : open_) open.run.abort(engine());
}

}  // namespace samestep
