#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "collectives/segment_plan.h"
#include "engine/operation.h"

namespace samestep {

/// Two-shot allreduce, reduce, reduce_scatter and bcast of long buffers, in segments of bounded size. In each segment
/// every rank owns one chunk: the others send it their elements, it reduces them in pairwise order of rank, and sends
/// the result to the ranks that need it. For an allreduce each of p ranks sends and receives 2 (p - 1) / p of the
/// buffer, the minimum, and each element is reduced once. A few segments are in flight at the same time.
///
/// Source of the two phases: Rabenseifner, ICCS 2004, LNCS 3036, 1-9. Here ranks exchange directly instead of by
/// halving, which keeps the order of summation.
class TwoShotReduction : public Collective {
 public:
  /// See OneShotReduction.
  TwoShotReduction(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args);

  /// Default size of a chunk, in bytes: long enough for a message to pay, short enough that arriving chunks are reduced
  /// while they are in the cache.
  static std::size_t default_segment_bytes(int n_ranks);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> pending_peers() override;
  void abort() override;

 private:
  struct Segment {
    std::size_t index = 0;
    Scratch::Block block;
    std::vector<RequestSet> contributions_in;   // by contributing rank
    std::vector<RequestSet> contributions_out;  // by owner
    std::vector<RequestSet> results_in;         // by owner
    std::vector<bool> result_posted;            // by owner
    RequestSet results_out;
    bool own_chunk_is_finished = false;
  };

  bool contributes(int rank) const { return signature().type != CollectiveType::bcast || rank == signature().root; }
  bool receives_result(int rank) const;
  const std::byte* in_at(const Chunk& chunk) const { return in_bytes_ + chunk.in_offset * itemsize_; }
  std::byte* out_at(const Chunk& chunk) const { return out_bytes_ + chunk.out_offset * itemsize_; }

  void open_segment(std::size_t index);
  /// Reduces this rank's chunk once all contributions have arrived.
  bool finish_own_chunk(Segment& segment);
  void reduce_own_chunk(Segment& segment, const Chunk& chunk, std::byte* result);
  /// Posts the receives of results whose destination is no longer being sent from.
  bool post_results(Segment& segment);
  bool is_complete(Segment& segment);

  SegmentPlan plan_;
  Reduction reduction_;
  std::vector<double> factors_;
  DType dtype_;
  std::size_t itemsize_;
  const std::byte* in_bytes_;
  std::byte* out_bytes_;
  std::size_t next_segment_ = 0;
  std::deque<Segment> open_segments_;
  std::vector<std::size_t> next_result_;  // by owner: the segment whose result is posted next
};

}  // namespace samestep
