#pragma once

#include <deque>
#include <vector>

#include "exchange/halving_run.h"
#include "hierarchy/level_work.h"

namespace samestep {

/// A long allreduce over many hosts. As LevelWork, but the handlers of a chunk do not send their partial results to one
/// of them: they exchange halves, or all of it, with one partner after the other (see HalvingPlan). Chunks are longer,
/// so that the halves are worth a message. The bits are those of LevelWork.
class LevelHalving final : public LevelWork {
 public:
  /// `halves`: as HalvingPlan.
  LevelHalving(std::shared_ptr<Engine> engine, const Signature& signature, std::shared_ptr<LevelGroup> group,
               ConstBuffer in, Buffer out, const Reduction& reduction, bool halves);

 protected:
  bool work_on_chunks() override;
  void take_scratch() override {}
  std::vector<int> late_with_chunks() override;
  void give_up() override;

 private:
  struct Open {
    LevelChunk chunk;
    std::vector<int> handlers;  // by host
    Scratch::Block block;       // the sum over this host's ranks, and the run's room
    HalvingRun run;
  };

  void open_next();
  /// This host's sum: in `into`, or where its only rank's elements lie.
  const std::byte* sum_here(const LevelChunk& chunk, std::byte* into);

  bool halves_;
  std::deque<Open> open_;
};

}  // namespace samestep
