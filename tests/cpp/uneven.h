#pragma once

#include <cmath>
#include <map>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/reduce_op.h"
#include "floats.h"

namespace samestep {

/// Values whose sum depends on the order of the additions.
inline Floats uneven(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank * 1000) + static_cast<unsigned>(count));
  std::uniform_real_distribution<float> uniform(-1, 1);
  Floats values(count);
  for (float& value : values) value = uniform(random) * std::pow(10.0F, static_cast<float>(random() % 6));
  return values;
}

/// Uneven values of all ranks, and what comes of them. Made in one thread before the ranks begin, who only read: made
/// made by each of them they needed most of the time under the sanitizers, and made by the first rank that needs them
/// they would need a lock, which would order what ranks do and hide their races.
class UnevenTable {
 public:
  /// `reduce(values of each rank, op)` gives what must come out.
  template <class Reduce>
  UnevenTable(int size, std::span<const std::size_t> counts, std::span<const ReduceOp> ops, Reduce reduce) {
    for (const std::size_t count : counts) {
      for (int rank = 0; rank < size; ++rank) given_[count].push_back(uneven(rank, count));
      for (const ReduceOp op : ops) reduced_[{count, op}] = reduce(given_[count], op);
    }
  }

  const Floats& of(int rank, std::size_t count) const { return given_.at(count)[static_cast<std::size_t>(rank)]; }
  const Floats& reduced(std::size_t count, ReduceOp op) const { return reduced_.at({count, op}); }

 private:
  std::map<std::size_t, std::vector<Floats>> given_;  // by count and rank
  std::map<std::pair<std::size_t, ReduceOp>, Floats> reduced_;
};

}  // namespace samestep
