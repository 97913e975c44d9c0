#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "exchange/engine.h"
#include "exchange/halving_plan.h"
#include "exchange/requests.h"

namespace samestep {

/// The elements that go through the steps of one HalvingPlan.
class HalvingRun {
 public:
  /// What several runs of an operation have in common.
  struct Terms {
    DType dtype = DType::uint8;
    ReduceOp op = ReduceOp::sum;  ///< not `premul`: factors are in the elements already
    std::size_t n_ranks = 0;      ///< that avg divides by
    std::span<const int> ranks;   ///< of the group, by rank of the plan; empty where they are the same
    int first_tag = 0;            ///< and the next one
    std::size_t piece = 0;        ///< most bytes of a message; 0 = any
  };
  /// Can sums over some of the ranks be kept in this type without loss? Else all ranks' elements have to meet at once:
  /// sums of half types, which are rounded once, and averages of integers.
  static bool carries(DType dtype, ReduceOp op);

  /// `in`: this rank's elements, those of the plan's range; may be `out`, where the result goes. `room`: as many
  /// elements as the plan says, for use by this run alone. Receives what others may send unasked from now on.
  HalvingRun(Engine& engine, HalvingPlan plan, const Terms& terms, const std::byte* in, std::byte* out,
             std::byte* room);

  /// Goes on as far as it can, but begins only steps before `limit`: runs of the same ranks whose messages have the
  /// same tags begin each step in the same order. True at the end.
  bool advance(Engine& engine, std::size_t limit);
  /// Steps that have begun.
  std::size_t begun() const { return at_ + (posted_ ? 1 : 0); }

  /// Ranks of the group whose messages are awaited.
  std::vector<int> awaited(Engine& engine);
  void give_up(Engine& engine);

 private:
  const HalvingStep& step() const { return plan_.steps()[at_]; }
  int rank_of(int peer) const { return terms_.ranks.empty() ? peer : terms_.ranks[static_cast<std::size_t>(peer)]; }
  std::byte* result(Range range) const { return out_ + range.begin * itemsize(terms_.dtype); }
  const std::byte* held(Range range) const { return (has_added_ ? out_ : in_) + range.begin * itemsize(terms_.dtype); }
  std::size_t most() const { return terms_.piece == 0 ? SIZE_MAX : terms_.piece; }
  void begin(Engine& engine);
  void add_up();

  HalvingPlan plan_;
  Terms terms_;
  const std::byte* in_;
  std::byte* out_;
  std::vector<const std::byte*> arrivals_;  // by step, where what is to be added arrives
  std::vector<Requests> receives_;          // by step
  Requests sends_;
  std::size_t at_ = 0;
  bool posted_ = false;
  bool has_added_ = false;
};

}  // namespace samestep
