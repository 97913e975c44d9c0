#include "collectives/recursive_halving.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/reduce.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kHalvingsInFlight = 4;

}  // namespace

std::size_t RecursiveHalvingAllreduce::segment_nbytes(int n_ranks, std::size_t piece) {
  // The longest message, half a segment, is still eager over TCP, and the segments in flight stay in the cache.
  constexpr std::size_t kSegment = 1 << 20;
  return piece == 0 ? kSegment : piece * static_cast<std::size_t>(n_ranks);
}

RecursiveHalvingAllreduce::RecursiveHalvingAllreduce(std::shared_ptr<ProgressEngine> shared_engine,
                                                     const CollectiveArgs& args, bool scatter_first)
    : Collective(std::move(shared_engine), args.signature()),
      in_(args.in),
      out_(args.out),
      reduction_(args.reduction),
      scatter_first_(scatter_first),
      length_(args.out.count) {
  const std::size_t nbytes = segment_nbytes(size(), engine().options().segment_bytes);
  const std::size_t most = std::max<std::size_t>(1, nbytes / itemsize(out_.dtype));
  // Segments of nearly equal length, so that the last one is not much shorter than the others. With doubling the whole
  // buffer is one segment, as in the formulas of `select_algorithm`.
  if (scatter_first && out_.count != 0) {
    const std::size_t n_segments = (out_.count + most - 1) / most;
    length_ = (out_.count + n_segments - 1) / n_segments;
  }
}

void RecursiveHalvingAllreduce::post(std::uint64_t digest) { headers().post(sequence_, digest, {}); }

void RecursiveHalvingAllreduce::start_work() {
  if (!multiplies(reduction_.op)) return;
  // Each rank multiplies its own elements once; from then on it is a sum, which `mean` divides.
  const kernels::Input mine{in_.data, reduction_.factor};
  kernels::reduce(out_.dtype, reduction_.op, {&mine, 1}, out_.data, out_.count, 1);
  in_ = out_;
}

void RecursiveHalvingAllreduce::open_next_segment() {
  const std::size_t first = next_, item = itemsize(out_.dtype);
  next_ = std::min(out_.count, first + length_);
  RecursivePlan plan(size(), rank(), {0, next_ - first}, scatter_first_);
  RecursiveRun::Params params;
  params.dtype = out_.dtype;
  params.op = after_factors(reduction_.op);
  params.divisor = reduction_.divisor_of(size());
  params.first_tag = tags::of_operation(sequence_, 0);
  params.piece = engine().options().segment_bytes;
  Scratch::Block room;
  if (plan.room() != 0) room = engine().scratch().take(plan.room() * item);
  std::byte* const at = room.data.get();
  const auto* const in = static_cast<const std::byte*>(in_.data) + first * item;
  auto* const out = static_cast<std::byte*>(out_.data) + first * item;
  open_segments_.push_back({std::move(room), RecursiveRun(engine(), std::move(plan), params, in, out, at)});
}

bool RecursiveHalvingAllreduce::work() {
  while (true) {
    while (next_ < out_.count && open_segments_.size() < kHalvingsInFlight) open_next_segment();
    if (open_segments_.empty()) return true;
    if (!advance_first(engine(), open_segments_)) return false;
    // Blocks for the segments in flight serve a buffer of any length.
    if (open_segments_.front().room.data != nullptr) engine().scratch().release(std::move(open_segments_.front().room));
    open_segments_.pop_front();
  }
}

std::vector<int> RecursiveHalvingAllreduce::pending_peers() {
  return open_segments_.empty() ? std::vector<int>{} : open_segments_.front().run.pending_peers(engine());
}

void RecursiveHalvingAllreduce::abort() {
  Collective::abort();
  for (Segment& segment : open_segments_) segment.run.abort(engine());
}

}  // namespace samestep
