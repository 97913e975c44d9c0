#include "collectives/two_shot_reduction.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kSegmentsInFlight = 3;

}  // namespace

std::size_t TwoShotReduction::default_segment_bytes(int n_ranks) {
  // The chunks of all owners have 2 MiB at most, so that segments do not grow with the group, and each has 16 KiB at
  // least: a shorter one costs more as a message than as bytes.
  constexpr std::size_t kMaxSegment = 256 << 10, kMinSegment = 16 << 10, kOfAllOwners = 2 << 20;
  return std::clamp(kOfAllOwners / static_cast<std::size_t>(n_ranks), kMinSegment, kMaxSegment);
}

TwoShotReduction::TwoShotReduction(std::shared_ptr<ProgressEngine> shared_engine, const CollectiveArgs& args)
    : Collective(std::move(shared_engine), args.signature()),
      reduction_(args.reduction),
      dtype_(args.out.dtype),
      itemsize_(itemsize(args.out.dtype)),
      in_bytes_(static_cast<const std::byte*>(args.in.data)),
      out_bytes_(static_cast<std::byte*>(args.out.data)) {
  const int n_ranks = size();
  const std::size_t wanted = engine().options().segment_bytes;
  const std::size_t piece =
      std::max<std::size_t>(1, (wanted != 0 ? wanted : default_segment_bytes(n_ranks)) / itemsize_);
  plan_ = args.type == CollectiveType::reduce_scatter ? SegmentPlan::of_blocks(n_ranks, args.out.count, piece)
                                                      : SegmentPlan::of_buffer(n_ranks, args.out.count, piece);
  if (args.type == CollectiveType::bcast) in_bytes_ = out_bytes_;  // `out` is read at root
  next_result_.resize(static_cast<std::size_t>(n_ranks));
}

bool TwoShotReduction::receives_result(int rank) const {
  switch (signature().type) {
    case CollectiveType::allreduce:
      return true;
    case CollectiveType::reduce:
      return rank == signature().root;
    case CollectiveType::bcast:
      return rank != signature().root;
    default:
      return false;
  }
}

void TwoShotReduction::post(std::uint64_t digest) {
  // Also where nobody multiplies, so that all headers of this operation have one form. Ranks may pass different
  // factors, and the owner of a chunk needs those of all of them.
  const auto* factor = reinterpret_cast<const std::byte*>(&reduction_.factor);
  headers().post(sequence_, digest, {factor, sizeof reduction_.factor});
}

void TwoShotReduction::start_work() {
  factors_.resize(static_cast<std::size_t>(size()), reduction_.factor);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    std::memcpy(&factors_[static_cast<std::size_t>(peer)], headers().data(sequence_, peer).data(), sizeof(double));
  }
}

bool TwoShotReduction::work() {
  while (next_segment_ < plan_.segments() && open_segments_.size() < kSegmentsInFlight) open_segment(next_segment_++);
  bool earlier_finished = true;  // results are sent in order of segments, because all segments share their tags
  for (Segment& segment : open_segments_) {
    if (earlier_finished) earlier_finished = finish_own_chunk(segment);
    post_results(segment);
  }
  while (!open_segments_.empty() && is_complete(open_segments_.front())) {
    engine().scratch().release(std::move(open_segments_.front().block));
    open_segments_.pop_front();
  }
  return open_segments_.empty() && next_segment_ == plan_.segments();
}

void TwoShotReduction::open_segment(std::size_t index) {
  const auto n_ranks = static_cast<std::size_t>(size());
  Segment& segment = open_segments_.emplace_back();
  segment.index = index;
  segment.contributions_in.resize(n_ranks);
  segment.contributions_out.resize(n_ranks);
  segment.results_in.resize(n_ranks);
  segment.result_posted.resize(n_ranks);
  // Peers in rotated order, so that not all ranks send to the same one at once.
  const int tag = tags::of_operation(sequence_, 0);
  const Chunk mine = plan_.chunk(index, rank());
  const bool reduces = signature().type != CollectiveType::bcast;
  if (reduces) segment.block = engine().scratch().take(n_ranks * plan_.longest() * itemsize_);
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const auto i = static_cast<std::size_t>(peer);
    if (contributes(peer) && mine.count != 0) {
      // A chunk of a broadcast is received directly into the output. Contributions to a sum need memory until all have
      // arrived.
      std::byte* place = reduces ? segment.block.data.get() + i * plan_.longest() * itemsize_ : out_at(mine);
      segment.contributions_in[i].receive(transport(), place, mine.count * itemsize_, peer, tag);
    }
    const Chunk theirs = plan_.chunk(index, peer);
    if (contributes(rank()) && theirs.count != 0) {
      segment.contributions_out[i].send(transport(), in_at(theirs), theirs.count * itemsize_, peer, tag);
      engine().count_message(theirs.count * itemsize_);
    }
  }
}

bool TwoShotReduction::finish_own_chunk(Segment& segment) {
  if (segment.own_chunk_is_finished) return true;
  for (RequestSet& contribution : segment.contributions_in) {
    if (!contribution.test(transport())) return false;
  }
  segment.own_chunk_is_finished = true;
  const Chunk chunk = plan_.chunk(segment.index, rank());
  if (chunk.count == 0) return true;
  // No peer gets this rank's elements of its own chunk, so in place the result may be stored over them.
  std::byte* result = out_at(chunk);
  if (signature().type != CollectiveType::bcast) {
    const bool own_place = signature().type != CollectiveType::reduce || rank() == signature().root;
    // A rank that gets no result has no `out`; its own slot of the scratch block is unused.
    if (!own_place) result = segment.block.data.get() + static_cast<std::size_t>(rank()) * plan_.longest() * itemsize_;
    reduce_own_chunk(segment, chunk, result);
  }
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (!receives_result(peer)) continue;
    segment.results_out.send(transport(), result, chunk.count * itemsize_, peer, tags::of_operation(sequence_, 1));
    engine().count_message(chunk.count * itemsize_);
  }
  return true;
}

void TwoShotReduction::reduce_own_chunk(Segment& segment, const Chunk& chunk, std::byte* result) {
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool mine = static_cast<int>(i) == rank();
    inputs[i] = {mine ? in_at(chunk) : segment.block.data.get() + i * plan_.longest() * itemsize_, factors_[i]};
  }
  kernels::reduce(dtype_, reduction_.op, inputs, result, chunk.count, reduction_.divisor_of(size()));
}

bool TwoShotReduction::post_results(Segment& segment) {
  if (!receives_result(rank())) return true;
  bool all_posted = true;
  for (int step = 1; step < size(); ++step) {
    const int owner = (rank() + step) % size();
    const auto i = static_cast<std::size_t>(owner);
    // Results of an owner arrive in the order of segments with one tag, so their receives have to be posted in that
    // order.
    if (segment.result_posted[i]) continue;
    // In place, the result overwrites elements that this rank may still be sending.
    if (next_result_[i] != segment.index || !segment.contributions_out[i].test(transport())) {
      all_posted = false;
      continue;
    }
    const Chunk chunk = plan_.chunk(segment.index, owner);
    if (chunk.count != 0) {
      segment.results_in[i].receive(transport(), out_at(chunk), chunk.count * itemsize_, owner,
                                    tags::of_operation(sequence_, 1));
    }
    segment.result_posted[i] = true;
    ++next_result_[i];
  }
  return all_posted;
}

bool TwoShotReduction::is_complete(Segment& segment) {
  if (!segment.own_chunk_is_finished || !post_results(segment)) return false;
  if (!segment.results_out.test(transport())) return false;
  for (std::size_t i = 0; i < segment.results_in.size(); ++i) {
    // Contributions as well: the caller may change its input once the operation is done.
    if (!segment.results_in[i].test(transport()) || !segment.contributions_out[i].test(transport())) return false;
  }
  return true;
}

std::vector<int> TwoShotReduction::pending_peers() {
  std::vector<int> peers;
  if (open_segments_.empty()) return peers;
  Segment& segment = open_segments_.front();
  for (std::size_t i = 0; i < segment.results_in.size(); ++i) {
    const bool contributed = segment.contributions_in[i].test(transport());
    const bool has_result = !receives_result(rank()) || static_cast<int>(i) == rank() ||
                            (segment.result_posted[i] && segment.results_in[i].test(transport()));
    if (!contributed || !has_result) peers.push_back(static_cast<int>(i));
  }
  return peers;
}

void TwoShotReduction::abort() {
  Collective::abort();
  for (Segment& segment : open_segments_) {
    for (RequestSet& requests : segment.contributions_in) requests.abandon(transport());
    for (RequestSet& requests : segment.results_in) requests.abandon(transport());
  }
}

}  // namespace samestep
