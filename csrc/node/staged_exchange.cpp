#include "node/staged_exchange.h"

#include <algorithm>
#include <bit>

#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kLine = 64;
constexpr int kStepsAtOnce = 128;  // then other operations of the group make a step
constexpr std::size_t whole_lines(std::size_t nbytes) { return nbytes / kLine * kLine; }

}  // namespace

StagedExchange::StagedExchange(NodeGroup& group, std::uint64_t sequence, CollectiveType verb, std::size_t nbytes,
                               bool non_temporal)
    : group_(group),
      sequence_(sequence),
      nbytes_(nbytes),
      same_to_all_(verb == CollectiveType::bcast || verb == CollectiveType::allgather),
      has_several_readers_(has_several_readers(verb, group.region->size())),
      non_temporal_(non_temporal),
      is_two_rank_swap_(group.region->size() == 2 &&
                        (verb == CollectiveType::allgather || verb == CollectiveType::alltoall)) {
  // Each receiver has its part of the sender's stage, its lane. If all receive the same, or root alone receives, one
  // lane is the whole stage.
  if (!same_to_all_ && verb != CollectiveType::gather)
    n_lanes_ = static_cast<std::size_t>(std::max(group.region->size() - 1, 1));
  is_two_rank_swap_ ? plan_exchange() : plan_segments();
}

void StagedExchange::plan_segments() {
  constexpr std::size_t kMinSegment = 16 << 10, kMaxSegment = 64 << 10, kSegments = 8;
  lane_nbytes_ = whole_lines(ShmRegion::kStages * ShmRegion::kStageBytes / n_lanes_);
  const std::size_t wanted = std::clamp(std::bit_ceil(nbytes_ / kSegments), kMinSegment, kMaxSegment);
  // A lane has at least two segments, so that one is copied out while the next one is copied in.
  segment_nbytes_ = std::min(wanted, whole_lines(lane_nbytes_ / 2));
  depth_ = lane_nbytes_ / segment_nbytes_;
  n_segments_ = (nbytes_ + segment_nbytes_ - 1) / segment_nbytes_;
}

/// Uses an even number of segments, so that the rank which stages the first segment of the next operation has read
/// those lines last.
void StagedExchange::plan_exchange() {
  constexpr std::size_t kMaxSegment = 64 << 10;
  n_segments_ = (nbytes_ + 2 * kMaxSegment - 1) / (2 * kMaxSegment) * 2;
  segment_nbytes_ = whole_lines(nbytes_ / n_segments_ + kLine);
  n_segments_ = (nbytes_ + segment_nbytes_ - 1) / segment_nbytes_;
}

bool StagedExchange::supports(CollectiveType verb, int size) {
  const bool even = verb == CollectiveType::bcast || verb == CollectiveType::allgather ||
                    verb == CollectiveType::gather || verb == CollectiveType::scatter ||
                    verb == CollectiveType::alltoall;
  return even && size <= Thresholds::kMaxStagedRanks;
}

bool StagedExchange::has_several_readers(CollectiveType verb, int size) {
  return size > 2 && (verb == CollectiveType::bcast || verb == CollectiveType::allgather);
}

void StagedExchange::send(int peer, const std::byte* from) { outgoing_.push_back({peer, from}); }

void StagedExchange::receive(int peer, std::byte* into) { incoming_.push_back({peer, into}); }

std::byte* StagedExchange::staged(int sender, int receiver, std::size_t segment) const {
  if (is_two_rank_swap_) return group_.region->stage((sender + static_cast<int>(segment % 2)) % 2, 0);
  const int size = group_.region->size();
  const auto lane = n_lanes_ == 1 ? 0 : static_cast<std::size_t>((receiver - sender - 1 + size) % size);
  return group_.region->stage(sender, 0) + lane * lane_nbytes_ + segment % depth_ * segment_nbytes_;
}

std::size_t StagedExchange::length(std::size_t segment) const {
  return std::min(segment_nbytes_, nbytes_ - segment * segment_nbytes_);
}

bool StagedExchange::may_step() const {
  const ShmRegion& region = *group_.region;
  for (const Outgoing& run : outgoing_) {
    // In a swap both ranks write to both stages. Else the segment that used the place before must have been copied out.
    // A receiver that has copied out segment k has published step k + 2.
    const std::uint64_t taken = is_two_rank_swap_ ? step_ : step_ < depth_ ? 0 : step_ - depth_ + 2;
    const bool ahead = taken == 0 || step_ == n_segments_ || (is_two_rank_swap_ && !incoming_.empty());
    if (!ahead && !region.is_at(sequence_, run.peer, taken)) return false;
  }
  for (const Incoming& run : incoming_) {
    if (step_ != 0 && !region.is_at(sequence_, run.peer, step_)) return false;
  }
  return true;
}

bool StagedExchange::work() {
  for (int turn = 0; step_ <= n_segments_; ++turn) {
    if (turn == kStepsAtOnce || !may_step()) return false;
    if (is_two_rank_swap_ && step_ > 0) {
      swap(step_);
    } else {
      if (step_ > 0) copy_out(step_ - 1);
      if (step_ < n_segments_) copy_in(step_);
    }
    group_.region->set_step(sequence_, group_.rank, ++step_);
  }
  return true;
}

void StagedExchange::copy_in(std::size_t segment) const {
  const auto copy = has_several_readers_ && non_temporal_ ? &kernels::copy_nontemporal : &kernels::copy_vectorized;
  for (const Outgoing& run : outgoing_) {
    copy(staged(group_.rank, run.peer, segment), run.from + segment * segment_nbytes_, length(segment));
    if (same_to_all_) return;
  }
}

void StagedExchange::copy_out(std::size_t segment) const {
  for (const Incoming& run : incoming_) {
    std::byte* const from = staged(run.peer, group_.rank, segment);
    std::byte* const into = run.into + segment * segment_nbytes_;
    has_several_readers_ ? kernels::copy_vectorized(into, from, length(segment))
                         : kernels::copy_and_own_lines(into, from, length(segment));
  }
}

/// Copies the peer's last segment out of a place and this rank's next one into it.
void StagedExchange::swap(std::size_t step) const {
  constexpr std::size_t kAtOnce = 4 << 10;  // bytes, which stay in the L1 cache
  const bool receives = !incoming_.empty(), sends = !outgoing_.empty() && step < n_segments_;
  std::byte* const lines = staged(group_.rank, group_.rank, step);
  std::byte* const into = receives ? incoming_.front().into + (step - 1) * segment_nbytes_ : nullptr;
  const std::byte* const from = sends ? outgoing_.front().from + step * segment_nbytes_ : nullptr;
  const std::size_t n_in = receives ? length(step - 1) : 0, n_out = sends ? length(step) : 0;
  for (std::size_t at = 0; at < std::max(n_in, n_out); at += kAtOnce) {
    if (at < n_in) kernels::copy_vectorized(into + at, lines + at, std::min(kAtOnce, n_in - at));
    if (at < n_out) kernels::copy_vectorized(lines + at, from + at, std::min(kAtOnce, n_out - at));
  }
}

}  // namespace samestep
