#pragma once

#include <cstddef>

#include "communicator/signature.h"
#include "hierarchy/seats.h"

namespace samestep {

inline constexpr int kEverybody = -1;

/// A part of the elements that goes through the levels on its own.
struct LevelChunk {
  std::size_t in_offset = 0;   ///< where every contributor has it, in elements
  std::size_t out_offset = 0;  ///< where everybody who wants it puts it
  std::size_t count = 0;
  int source = kEverybody;     ///< the rank it comes from; kEverybody = it is reduced over all
  int wanted_by = kEverybody;  ///< the rank that gets it
  int finisher = 0;            ///< the host where it is finished, and goes from there to the others
};

/// How a long collective is cut into chunks, and who does what with each. On every host one rank, the *handler*,
/// reduces the elements of its host and exchanges the result with the handlers of the other hosts. Pure: all ranks
/// compute the same.
///
/// Handlers of a reduction or broadcast are the ranks of one lane, chunks go to the lanes by turns, and of an allreduce
/// to the hosts by turns. Where a chunk comes from one rank or goes to one, that rank handles it.
class LevelPlan {
 public:
  /// `count`: elements of the buffer; of one block where the verb has blocks (all_gather, reduce_scatter).
  /// `piece`: most elements of a chunk, > 0. `together`: all hosts finish each chunk, and `finisher` means nothing.
  LevelPlan(const Seats& seats, Verb verb, int root, std::size_t count, std::size_t piece, bool together = false);

  std::size_t chunks() const { return chunks_; }
  /// The chunks cover the elements exactly once; none is empty.
  LevelChunk chunk(std::size_t number) const;
  int handler(std::size_t number, int host) const;
  /// Does the rank handle any?
  bool has_work(int rank) const;
  /// The longest chunk, in elements.
  std::size_t longest() const { return length_; }

  bool reduces() const { return verb_ == Verb::all_reduce || verb_ == Verb::reduce || verb_ == Verb::reduce_scatter; }
  /// Do hosts other than the finisher get the result?
  bool spreads() const { return verb_ != Verb::reduce && verb_ != Verb::reduce_scatter; }

 private:
  bool has_blocks() const { return verb_ == Verb::all_gather || verb_ == Verb::reduce_scatter; }

  const Seats* seats_;
  Verb verb_;
  int root_;
  std::size_t count_;
  std::size_t length_ = 0;
  std::size_t per_block_ = 0;
  std::size_t chunks_ = 0;
};

}  // namespace samestep
