#include "collectives/select_algorithm.h"

#include <algorithm>

#include "collectives/recursive_halving.h"
#include "collectives/recursive_plan.h"
#include "collectives/two_shot_reduction.h"

namespace samestep {
namespace {

// benchmarks/cost_model.py has the same formulas and prices and explains them; a test compares the two.
constexpr double kLatency = 15e-6;     // s for a message, without the CPU time at its ends
constexpr double kMessage = 5e-6;      // s of CPU time for a message, at each end
constexpr double kCopy = 0.22e-9;      // s of CPU time for a byte, at each end
constexpr double kBandwidth = 1.19e9;  // bytes/s of the network card: 10 Gbit/s
constexpr double kReduce = 0.0133e-9;  // s for a byte that is read to be reduced

double divide_up(double a, double b) {
  const auto whole = static_cast<std::size_t>(a / b);
  return std::max(1.0, static_cast<double>(whole) + (static_cast<double>(whole) * b < a ? 1.0 : 0.0));
}

}  // namespace

double predicted_seconds(Algorithm algorithm, int n_ranks, std::size_t nbytes) {
  const double n = n_ranks, size = static_cast<double>(nbytes);
  const RecursiveCost steps = recursive_cost(n_ranks, algorithm == Algorithm::recursive_halving);
  double rounds = steps.rounds, messages = steps.messages, bytes = 2 * (n - 1) / n * size, reduced = bytes;
  if (algorithm == Algorithm::two_shot) {
    rounds = 2;
    messages = 2 * (n - 1) * divide_up(size, static_cast<double>(TwoShotReduction::default_segment_bytes(n_ranks)) * n);
    reduced = size;
  } else if (algorithm == Algorithm::recursive_halving) {
    messages *= divide_up(size, static_cast<double>(RecursiveHalvingAllreduce::segment_nbytes(n_ranks, 0)));
  } else {
    bytes = messages * size;
    reduced = 2 * bytes;
  }
  const double busy = 2 * messages * kMessage + 2 * bytes * kCopy + reduced * kReduce, card = bytes / kBandwidth;
  // With segments the CPU works while the network card transfers; with doubling the two take turns.
  return rounds * kLatency + (algorithm == Algorithm::recursive_doubling ? busy + card : std::max(busy, card));
}

Algorithm select_algorithm(int n_ranks, std::size_t nbytes) {
  if (n_ranks < 2) return Algorithm::two_shot;
  const auto by_cost = [&](Algorithm a, Algorithm b) {
    return predicted_seconds(a, n_ranks, nbytes) < predicted_seconds(b, n_ranks, nbytes);
  };
  // If predictions are equal, the first of these: `min` returns the leftmost.
  return std::min({Algorithm::two_shot, Algorithm::recursive_halving, Algorithm::recursive_doubling}, by_cost);
}

}  // namespace samestep
