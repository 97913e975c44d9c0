#pragma once

#include <cstddef>

#include "engine/algorithm.h"

namespace samestep {

/// Predicted duration of an allreduce of `nbytes` among `n_ranks` hosts, in seconds, by the formulas and for the
/// network that docs/scaling.md describes.
double predicted_seconds(Algorithm algorithm, int n_ranks, std::size_t nbytes);

/// The algorithm with the shortest prediction. Pure: the same on all ranks.
Algorithm select_algorithm(int n_ranks, std::size_t nbytes);

}  // namespace samestep
