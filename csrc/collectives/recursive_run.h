#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/recursive_plan.h"
#include "core/dtype.h"
#include "core/reduce_op.h"
#include "engine/progress_engine.h"
#include "transport/request_set.h"

namespace samestep {

/// The execution of one RecursivePlan on one segment.
class RecursiveRun {
 public:
  /// What the runs of an operation have in common.
  struct Params {
    DType dtype = DType::uint8;
    ReduceOp op = ReduceOp::sum;  ///< not `premul`: the elements are multiplied before
    double divisor = 1;           ///< of avg and mean
    std::span<const int> ranks;   ///< of the group, by rank of the plan; empty if they are the same
    int first_tag = 0;            ///< the run uses two tags
    std::size_t piece = 0;        ///< limit of a message in bytes; 0: none
  };
  /// Whether this type holds partial results without loss. It does not for sums of half types, which are rounded only
  /// once, and averages of integers.
  static bool supports(DType dtype, ReduceOp op);

  /// `in`: this rank's elements of the plan's range; may be `out`, which receives the result. `room`: scratch memory of
  /// as many elements as the plan says. Posts the receives of eager messages.
  RecursiveRun(ProgressEngine& engine, RecursivePlan plan, const Params& params, const std::byte* in, std::byte* out,
               std::byte* room);

  /// Makes progress without blocking, but starts only steps before `limit`: runs whose messages have the same tags must
  /// start each step in the same order on all ranks. True at the end.
  bool advance(ProgressEngine& engine, std::size_t limit);
  /// Number of steps that have started.
  std::size_t n_started() const { return at_ + (posted_ ? 1 : 0); }

  /// Ranks of the group for whose messages it waits.
  std::vector<int> pending_peers(ProgressEngine& engine);
  void abort(ProgressEngine& engine);

 private:
  const RecursiveStep& step() const { return plan_.steps()[at_]; }
  int rank_of(int peer) const { return params_.ranks.empty() ? peer : params_.ranks[static_cast<std::size_t>(peer)]; }
  std::byte* result(Range range) const { return out_ + range.begin * itemsize(params_.dtype); }
  const std::byte* held(Range range) const {
    return (has_combined_ ? out_ : in_) + range.begin * itemsize(params_.dtype);
  }
  std::size_t max_elements() const { return params_.piece == 0 ? SIZE_MAX : params_.piece; }
  void begin(ProgressEngine& engine);
  void combine();

  RecursivePlan plan_;
  Params params_;
  const std::byte* in_;
  std::byte* out_;
  std::vector<const std::byte*> arrivals_;  // by step: the buffer of elements to combine
  std::vector<RequestSet> receives_;        // by step
  RequestSet sends_;
  std::size_t at_ = 0;
  bool posted_ = false;
  bool has_combined_ = false;
};

/// Advances `open`, entries with a `run`, of which none may overtake an earlier one, because their messages have the
/// same tags. True once the first has ended.
template <class Entries>
bool advance_first(ProgressEngine& engine, Entries& open) {
  std::size_t limit = SIZE_MAX;
  for (auto& entry : open) {
    entry.run.advance(engine, limit);
    limit = entry.run.n_started();
  }
  // The first run waits for no other one, so it alone may start all of its steps.
  return open.front().run.advance(engine, SIZE_MAX);
}

}  // namespace samestep
