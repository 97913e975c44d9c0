#include "hierarchy/hierarchical_collective.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"
#include "node/node_group.h"
#include "shm/shared_heap.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr int kContribution = 0, kResult = 1;  // phases of an operation's tags
constexpr std::size_t kStep = 32 << 10;        // bytes that are reduced at a time, so that they stay in the cache

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

/// Default size of a chunk: long enough for a message to pay, short enough that the chunks in flight stay in the cache.
std::size_t piece_nbytes(const ProgressEngine& engine, const Topology& topology) {
  if (engine.options().segment_bytes != 0) return engine.options().segment_bytes;
  constexpr std::size_t kMaxSegment = 48 << 10, kMinSegment = 16 << 10, kOfAllOwners = 1 << 20;
  return std::clamp(kOfAllOwners / static_cast<std::size_t>(topology.n_hosts()), kMinSegment, kMaxSegment);
}

HierarchicalPlan plan_for(const ProgressEngine& engine, const HierarchicalGroup& group, const CollectiveArgs& args) {
  const std::size_t piece = std::max<std::size_t>(1, piece_nbytes(engine, group.topology) / itemsize(args.in.dtype));
  return HierarchicalPlan(group.topology, args.type, args.root, args.own().count, piece);
}

// avg divides once, between hosts, and so does mean: within a host its divisor is 1.
ReduceOp within_host(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

}  // namespace

HierarchicalCollective::HierarchicalCollective(std::shared_ptr<ProgressEngine> shared_engine,
                                               const CollectiveArgs& args, std::shared_ptr<HierarchicalGroup> group)
    : HierarchicalCollective(shared_engine, args, group, plan_for(*shared_engine, *group, args)) {}

HierarchicalCollective::HierarchicalCollective(std::shared_ptr<ProgressEngine> shared_engine,
                                               const CollectiveArgs& args, std::shared_ptr<HierarchicalGroup> group,
                                               HierarchicalPlan plan)
    : Collective(std::move(shared_engine), args.signature()),
      group_(std::move(group)),
      in_(args.in),
      out_(args.out),
      reduction_(args.reduction),
      itemsize_(itemsize(args.in.dtype)),
      plan_(std::move(plan)),
      // Chunks of an allreduce have the root hosts in turn, so these are three for each host.
      max_open_(3 * static_cast<std::size_t>(group_->topology.n_hosts())),
      block_((plan_.longest() * itemsize_ + 63) / 64 * 64) {
  stage_if_not_shared();
}

void HierarchicalCollective::stage_if_not_shared() {
  const HierarchicalGroup& group = *group_;
  if (group.peers == nullptr) return;
  const std::shared_ptr<SharedHeap> heap = group.peers->heap();
  const auto stage = [&](std::size_t nbytes) -> std::shared_ptr<std::byte> {
    std::shared_ptr<std::byte> block = allocate_shared(heap, nbytes);
    if (block == nullptr) {
      throw UnavailableError(str("no ", nbytes, " bytes of shared memory to reach the other ranks of this host"));
    }
    return block;
  };
  // Without CMA, or where it cannot reach this buffer, other ranks can use a copy in shared memory.
  const auto hidden = [&](const void* data, std::size_t nbytes) {
    if (nbytes == 0 || (group.peers->to_remote_address(data, nbytes) & LocalPeers::kSharedAddressBit) != 0)
      return false;
    const std::span<const std::byte> buffer(static_cast<const std::byte*>(data), nbytes);
    return !group.peers->has_cma() || group.peers->hides({&buffer, 1});
  };
  // All ranks contribute, except in a broadcast, where only root does.
  const bool gives =
      signature().root < 0 || signature().type == CollectiveType::reduce || signature().root == group.rank;
  if (gives && hidden(in_.data, in_.nbytes())) {
    staged_in_ = stage(in_.nbytes());
    kernels::copy(staged_in_.get(), in_.data, in_.nbytes());
    in_.data = staged_in_.get();
  }
  if (wants(plan_.chunks() == 0 ? HierarchicalChunk{} : plan_.chunk(0), group.rank) &&
      hidden(out_.data, out_.nbytes())) {
    staged_out_ = stage(out_.nbytes());
    user_out_ = std::exchange(out_.data, staged_out_.get());
  }
}

void HierarchicalCollective::post(std::uint64_t digest) {
  posted_ = true;
  const auto address_of = [this](const void* data, std::size_t nbytes) {
    // A rank that gives or gets nothing has no such buffer.
    return group_->peers == nullptr || data == nullptr ? 0 : group_->peers->to_remote_address(data, nbytes);
  };
  const Posted posted{reduction_.factor, address_of(in_.data, in_.nbytes()), address_of(out_.data, out_.nbytes()),
                      in_.nbytes(), out_.nbytes()};
  headers().post(sequence_, digest, {reinterpret_cast<const std::byte*>(&posted), sizeof posted});
}

void HierarchicalCollective::start_work() {
  const int me = rank();
  of_ranks_.resize(static_cast<std::size_t>(size()));
  of_ranks_[static_cast<std::size_t>(me)].factor = reduction_.factor;
  for (const int rank : group_->local_ranks()) {
    if (rank == me) continue;
    // Only the addresses of this host's ranks are of use: memory of other hosts cannot be reached.
    const HeaderExchange::Bytes data = headers().data(sequence_, rank);
    Posted& posted = of_ranks_[static_cast<std::size_t>(rank)];
    if (data.size() != sizeof posted) throw Error("the ranks of this host run different versions of samestep");
    std::memcpy(&posted, data.data(), sizeof posted);
  }
  for (std::size_t number = 0; number < plan_.chunks(); ++number) {
    if (plan_.leader(number, group_->own_host()) == me) mine_.push_back(number);
  }
  take_scratch();
  // A rank may return once all leaders of its host have read its input and stored its output: they send one byte.
  done_in_.resize(group_->local_ranks().size());
  done_bytes_.resize(static_cast<std::size_t>(size()));
  for (const int rank : group_->local_ranks()) {
    // Contributions are sent between hosts only, so that their tag is free among the ranks of a host.
    if (rank == me || !plan_.has_work(rank)) continue;
    done_in_[static_cast<std::size_t>(group_->topology.local_index(rank))].receive(
        transport(), &done_bytes_[static_cast<std::size_t>(rank)], 1, rank,
        tags::of_operation(sequence_, kContribution));
  }
}

void HierarchicalCollective::take_scratch() {
  max_open_ = std::min(max_open_, mine_.size());
  const auto n_hosts = static_cast<std::size_t>(group_->topology.n_hosts());
  if (max_open_ != 0) scratch_ = engine().scratch().take(max_open_ * n_hosts * block_);
}

bool HierarchicalCollective::wants(const HierarchicalChunk& chunk, int rank) const {
  if (signature().type == CollectiveType::bcast) return rank != signature().root;
  return chunk.wanted_by == kEverybody || chunk.wanted_by == rank;
}

bool HierarchicalCollective::work() {
  // The buffers of a rank that has left must not be accessed. The engine soon fails this operation.
  if (peer_memory_lost_ || (group_->fence != nullptr && !group_->fence->all_present(sequence_))) return false;
  try {
    return work_on_chunks() && notify_local_ranks();
  } catch (const PeerMemoryLost&) {
    peer_memory_lost_ = true;
    return false;
  }
}

bool HierarchicalCollective::work_on_chunks() {
  bool moved = true;
  while (moved) {
    while (next_ < mine_.size() && open_.size() < max_open_) open_next();
    post_results();
    // In order, because all chunks share their tags.
    bool earlier_finished = true, earlier_stored = true;
    for (Open& open : open_) {
      bool& earlier = finishes_here(open) ? earlier_finished : earlier_stored;
      if (!open.done && earlier) open.done = finishes_here(open) ? finish(open) : store(open);
      earlier = earlier && open.done;
      if (!earlier_finished && !earlier_stored) break;
    }
    moved = false;
    while (!open_.empty() && open_.front().done && open_.front().sent.test(transport())) {
      open_.pop_front();
      moved = next_ < mine_.size();
    }
  }
  return open_.empty() && next_ == mine_.size();
}

void HierarchicalCollective::open_next() {
  Open& open = open_.emplace_back();
  open.number = mine_[next_];
  open.chunk = plan_.chunk(open.number);
  const auto n_hosts = static_cast<std::size_t>(group_->topology.n_hosts());
  // Chunks are closed in the order in which they were opened, so this part of the scratch memory is free.
  open.room = scratch_.data.get() + next_ % max_open_ * n_hosts * block_;
  ++next_;
  // A chunk of a broadcast or allgather has one source, on its root host: nothing has to be collected.
  if (!plan_.reduces()) return;
  const int tag = tags::of_operation(sequence_, kContribution);
  if (finishes_here(open)) {
    open.contributions_in.resize(n_hosts);
    for (int host = 0; host < group_->topology.n_hosts(); ++host) {
      if (host == group_->own_host()) continue;
      open.contributions_in[static_cast<std::size_t>(host)].receive(
          transport(), block(open, host), bytes_of(open.chunk), plan_.leader(open.number, host), tag);
    }
    return;
  }
  // The partial sum is sent at once. From then on no rank of this host reads the inputs of this chunk, and its result
  // may be stored over them. If the host has one rank, the send itself may read them, see `post_results`.
  const std::vector<const std::byte*> inputs = local_inputs(open.chunk);
  std::byte* const into = block(open, group_->own_host());
  const std::byte* partial = reduce_locally(0, open.chunk.count, inputs, into);
  open.sent.send(transport(), partial, bytes_of(open.chunk), plan_.leader(open.number, open.chunk.root_host), tag);
  engine().count_message(bytes_of(open.chunk));
}

const std::byte* HierarchicalCollective::read_input(int rank, std::size_t offset, std::size_t nbytes,
                                                    std::byte* room) const {
  if (rank == group_->rank) return static_cast<const std::byte*>(in_.data) + offset;
  LocalPeers& host = *group_->peers;
  const Posted& theirs = posted_by(rank);
  const int peer = group_->topology.location(rank).local_rank;
  if (const std::byte* const here = host.map_peer_memory(peer, theirs.in, theirs.in_nbytes)) return here + offset;
  // The operation waits until the engine knows which rank has left, see PeerMemoryLost.
  if (!host.read_peer(peer, room, theirs.in + offset, nbytes)) throw PeerMemoryLost();
  return room;
}

std::byte* HierarchicalCollective::shared_output(int rank, std::size_t offset) const {
  const Posted& theirs = posted_by(rank);
  const int peer = group_->topology.location(rank).local_rank;
  std::byte* const here = group_->peers->map_peer_memory(peer, theirs.out, theirs.out_nbytes);
  return here == nullptr ? nullptr : here + offset;
}

std::vector<const std::byte*> HierarchicalCollective::local_inputs(const HierarchicalChunk& chunk) {
  std::vector<const std::byte*> inputs;
  const std::size_t offset = chunk.in_offset * itemsize_, nbytes = bytes_of(chunk);
  const auto ranks = group_->local_ranks();
  const std::size_t stride = (nbytes + 63) / 64 * 64;
  if (group_->bounce.size() < ranks.size() * stride) group_->bounce.resize(ranks.size() * stride);
  for (const int rank : ranks) {
    if (chunk.source != kEverybody && chunk.source != rank) continue;
    inputs.push_back(read_input(rank, offset, nbytes, group_->bounce.data() + inputs.size() * stride));
  }
  return inputs;
}

const std::byte* HierarchicalCollective::reduce_locally(std::size_t first, std::size_t count,
                                                        std::span<const std::byte* const> inputs,
                                                        std::byte* into) const {
  // The elements of a single rank are their own sum, unless they still have to be multiplied.
  if (inputs.size() == 1 && !multiplies(reduction_.op)) return inputs[0] + first * itemsize_;
  std::vector<kernels::Input> terms(inputs.size());
  const auto ranks = group_->local_ranks();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    terms[i] = {inputs[i] + first * itemsize_, posted_by(ranks[i]).factor};
  }
  kernels::reduce(in_.dtype, within_host(reduction_.op), terms, into, count, 1);
  return into;
}

bool HierarchicalCollective::finish(Open& open) {
  for (RequestSet& contribution : open.contributions_in) {
    if (!contribution.test(transport())) return false;
  }
  const std::size_t out_offset = open.chunk.out_offset * itemsize_;
  const bool kept = is_local_output(open.chunk);
  // The result is sent to other hosts from here: this rank's output, or scratch if it gets none.
  std::byte* home = kept ? bytes(out_.data) + out_offset : block(open, group_->own_host());
  if (!kept && !plan_.reduces()) home = bytes(const_cast<void*>(in_.data)) + open.chunk.in_offset * itemsize_;
  std::vector<void*> outs;
  if (kept) outs.push_back(home);
  for (const int rank : group_->local_ranks()) {
    if (rank == group_->rank || !wants(open.chunk, rank)) continue;
    if (std::byte* const at = shared_output(rank, out_offset)) outs.push_back(at);
  }
  if (outs.empty() && plan_.reduces()) outs.push_back(home);
  combine(open, outs);
  for (int host = 0; plan_.spreads() && host < group_->topology.n_hosts(); ++host) {
    if (host == group_->own_host()) continue;
    open.sent.send(transport(), home, bytes_of(open.chunk), plan_.leader(open.number, host),
                   tags::of_operation(sequence_, kResult));
    engine().count_message(bytes_of(open.chunk));
  }
  // Outputs in shared memory have been stored by `combine`; the others are written by CMA.
  write_to_local_ranks(open.chunk, outs.empty() ? home : bytes(outs[0]), /*to_shared_too=*/false);
  return true;
}

void HierarchicalCollective::combine(Open& open, std::span<void* const> outs) {
  const std::vector<const std::byte*> inputs = local_inputs(open.chunk);
  const std::size_t step = std::max<std::size_t>(kStep / itemsize_ / 64 * 64, 64);
  const auto n_hosts = static_cast<std::size_t>(group_->topology.n_hosts());
  if (group_->partial.size() < step * itemsize_) group_->partial.resize(step * itemsize_);
  std::vector<kernels::Input> terms(n_hosts);
  std::vector<void*> into(outs.begin(), outs.end());
  // In steps that stay in the cache: the partial sum of this host is read again at once, as one of the terms.
  for (std::size_t first = 0; first < open.chunk.count; first += step) {
    const std::size_t count = std::min(step, open.chunk.count - first), skip = first * itemsize_;
    for (std::size_t i = 0; i < outs.size(); ++i) into[i] = bytes(outs[i]) + skip;
    if (!plan_.reduces()) {
      for (void* const out : into) {
        if (out != inputs[0] + skip) kernels::copy(out, inputs[0] + skip, count * itemsize_);
      }
      continue;
    }
    for (std::size_t host = 0; host < n_hosts; ++host) {
      const bool here = static_cast<int>(host) == group_->own_host();
      terms[host].data = here ? reduce_locally(first, count, inputs, group_->partial.data())
                              : block(open, static_cast<int>(host)) + skip;
    }
    kernels::reduce_into(in_.dtype, after_factors(reduction_.op), terms, into, count, reduction_.divisor_of(size()));
  }
}

void HierarchicalCollective::post_results() {
  if (!plan_.spreads()) return;
  for (Open& open : open_) {
    if (finishes_here(open) || open.result_posted) continue;
    // In place, the result overwrites elements that this rank may still be sending.
    if (group_->local_ranks().size() == 1 && !open.sent.test(transport())) return;
    std::byte* const into = is_local_output(open.chunk) ? bytes(out_.data) + open.chunk.out_offset * itemsize_
                                                        : block(open, group_->own_host());
    open.result.receive(transport(), into, bytes_of(open.chunk), plan_.leader(open.number, open.chunk.root_host),
                        tags::of_operation(sequence_, kResult));
    open.result_posted = true;
  }
}

bool HierarchicalCollective::store(Open& open) {
  if (!plan_.spreads()) return true;
  if (!open.result_posted || !open.result.test(transport())) return false;
  // The result has arrived in this rank's output, and no other rank of this host has it yet.
  write_to_local_ranks(open.chunk, bytes(out_.data) + open.chunk.out_offset * itemsize_, /*to_shared_too=*/true);
  return true;
}

void HierarchicalCollective::write_to_local_ranks(const HierarchicalChunk& chunk, const std::byte* from,
                                                  bool to_shared_too) const {
  const std::size_t offset = chunk.out_offset * itemsize_, nbytes = bytes_of(chunk);
  for (const int rank : group_->local_ranks()) {
    if (rank == group_->rank || !wants(chunk, rank)) continue;
    if (std::byte* const at = shared_output(rank, offset)) {
      if (to_shared_too) kernels::copy(at, from, nbytes);
      continue;
    }
    const auto index = static_cast<std::size_t>(group_->topology.local_index(rank));
    if (!group_->fence->write(index, posted_by(rank).out + offset, from, nbytes)) throw PeerMemoryLost();
  }
}

bool HierarchicalCollective::notify_local_ranks() {
  if (!notified_) {
    notified_ = true;
    // Sends from the scratch memory have completed, see `work_on_chunks`.
    if (scratch_.data != nullptr) engine().scratch().release(std::move(scratch_));
    for (const int rank : group_->local_ranks()) {
      if (mine_.empty() || rank == group_->rank) continue;
      done_out_.send(transport(), &done_bytes_[static_cast<std::size_t>(group_->rank)], 1, rank,
                     tags::of_operation(sequence_, kContribution));
      engine().count_message(1);
    }
  }
  bool ended = done_out_.test(transport());
  for (RequestSet& end : done_in_) ended = ended && end.test(transport());
  // Only now: until all leaders have said that they are done, they may write to the copy in shared memory.
  if (ended && staged_out_ != nullptr) kernels::copy(user_out_, out_.data, out_.nbytes());
  return ended;
}

std::vector<int> HierarchicalCollective::pending_peers() {
  std::vector<int> late = pending_chunk_peers();
  for (std::size_t i = 0; i < done_in_.size(); ++i) {
    if (!done_in_[i].test(transport())) late.push_back(group_->local_ranks()[i]);
  }
  std::sort(late.begin(), late.end());
  return late;
}

std::vector<int> HierarchicalCollective::pending_chunk_peers() {
  std::vector<int> late;
  if (!open_.empty()) {
    Open& open = open_.front();
    for (std::size_t host = 0; host < open.contributions_in.size(); ++host) {
      if (!open.contributions_in[host].test(transport()))
        late.push_back(plan_.leader(open.number, static_cast<int>(host)));
    }
    if (!finishes_here(open) && !open.done) late.push_back(plan_.leader(open.number, open.chunk.root_host));
  }
  return late;
}

void HierarchicalCollective::abort() {
  // Peers that do not know yet that the operation has failed must not access this rank's buffers any more.
  if (posted_ && !is_mismatched() && group_->fence != nullptr) {
    group_->fence->leave(sequence_);
    group_->fence->withdraw(out_.data, out_.nbytes());
  }
  Collective::abort();
  for (Open& open : open_) {
    for (RequestSet& contribution : open.contributions_in) contribution.abandon(transport());
    open.result.abandon(transport());
  }
  for (RequestSet& end : done_in_) end.abandon(transport());
}

}  // namespace samestep
