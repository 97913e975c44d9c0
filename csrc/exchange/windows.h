#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "core/buffer.h"
#include "exchange/operation.h"
#include "exchange/window_plan.h"

namespace samestep {

/// Long allreduce, reduce, reduce_scatter and bcast, in windows of bounded size. In each window every
/// rank owns one chunk: the others send it their elements of that chunk, it reduces them once, in pairwise
/// order of rank, and sends the finished bytes to whoever needs them. Each rank sends and receives
/// 2 (p - 1) / p of the buffer for allreduce, the least possible, and every element is reduced once.
/// A few windows are under way at the same time.
///
/// Source of the two-phase scheme: Rabenseifner, ICCS 2004, LNCS 3036, 1-9 (with direct exchange in
/// place of halving, so that the order of summation is the contract's).
class Windows : public Collective {
 public:
  /// As ShortReduction; for bcast `in` is ignored and `reduction` unused.
  Windows(std::shared_ptr<Engine> engine, const Signature& signature, ConstBuffer in, Buffer out,
          const Reduction& reduction);

  /// Bytes of a chunk: long enough to pay for a message, short enough that what arrives is reduced while it is
  /// in the cache, and that all ranks' chunks together stay small.
  static std::size_t piece_nbytes(int n_ranks);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> awaited() override;
  void give_up() override;

 private:
  struct Window {
    std::size_t index = 0;
    Scratch::Block block;
    std::vector<Requests> contributions_in;   // by contributing rank
    std::vector<Requests> contributions_out;  // by owner
    std::vector<Requests> results_in;         // by owner
    std::vector<bool> result_posted;          // by owner
    Requests results_out;
    bool owned_is_finished = false;
  };

  bool contributes(int rank) const { return signature().verb != Verb::broadcast || rank == signature().root; }
  bool gets_results(int rank) const;
  const std::byte* in_at(const Chunk& chunk) const { return in_bytes_ + chunk.in_offset * itemsize_; }
  std::byte* out_at(const Chunk& chunk) const { return out_bytes_ + chunk.out_offset * itemsize_; }

  void open(std::size_t index);
  /// Finishes the chunk this rank owns once all contributions are here.
  bool finish_owned(Window& window);
  void reduce_owned(Window& window, const Chunk& chunk, std::byte* result);
  /// Posts the receives of results whose place is free.
  bool post_results(Window& window);
  bool drained(Window& window);

  WindowPlan plan_;
  Reduction reduction_;
  std::vector<double> factors_;
  DType dtype_;
  std::size_t itemsize_;
  const std::byte* in_bytes_;
  std::byte* out_bytes_;
  std::size_t next_window_ = 0;
  std::deque<Window> open_;
  std::vector<std::size_t> next_result_;  // by owner: the window whose result is to be posted next
};

}  // namespace samestep
