#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "exchange/halving_run.h"
#include "exchange/operation.h"
#include "exchange/scratch.h"

namespace samestep {

/// An allreduce among many ranks, in 2 log2(n) messages of each for a window (see HalvingPlan), or in log2(n) for a
/// buffer that is short. A few windows are under way at the same time. The bits are those of Windows.
class Halving final : public Collective {
 public:
  /// As Windows; HalvingRun carries this type and operator. `halves`: else everything is exchanged at each step.
  Halving(std::shared_ptr<Engine> engine, const Signature& signature, ConstBuffer in, Buffer out,
          const Reduction& reduction, bool halves);

  /// Bytes of a window among `n_ranks`, of which each gets one part in the end; `piece` = most bytes of a part, or 0.
  static std::size_t window_nbytes(int n_ranks, std::size_t piece);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> awaited() override;
  void give_up() override;

 private:
  struct Window {
    Scratch::Block room;
    HalvingRun run;
  };
  void open_next();

  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
  bool halves_;
  std::size_t length_;  // elements of a window
  std::size_t next_ = 0;
  std::deque<Window> open_;
};

}  // namespace samestep
