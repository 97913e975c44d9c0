#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace samestep {

enum class ReduceOp : std::uint8_t { sum, prod, min, max, avg, band, bor, bxor, land, lor, premul, mean };

inline constexpr int kReduceOpCount = 11;  ///< that users name: all but `mean`, which `weight=` of trees stands for

/// Lower-case name, e.g. "sum"; the one users write.
constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view kNames[] = {"sum", "prod", "min",  "max", "avg",    "band",
                                         "bor", "bxor", "land", "lor", "premul", "mean"};
  return kNames[static_cast<int>(op)];
}

/// Whether each rank's elements are multiplied by its factor.
constexpr bool multiplies(ReduceOp op) { return op == ReduceOp::premul || op == ReduceOp::mean; }
/// Whether the finished sum is divided.
constexpr bool divides(ReduceOp op) { return op == ReduceOp::avg || op == ReduceOp::mean; }

/// The operator over ranks, or hosts, whose elements have been multiplied.
constexpr ReduceOp after_factors(ReduceOp op) { return op == ReduceOp::premul ? ReduceOp::sum : op; }

/// How the elements of all ranks are combined: an operator and what it needs.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1.0;   ///< `premul` and `mean`: the result is the sum over ranks of factor * x
  double divisor = 1.0;  ///< `mean` only: of that sum; the same on all ranks

  /// What the sum over `n_ranks` is divided by.
  double divisor_of(int n_ranks) const { return op == ReduceOp::avg ? n_ranks : divisor; }
};

/// Throws InvalidArgumentError, naming both, if `op` is not defined for `dtype`. It is defined for:
///   bool      every op but avg, premul and mean (sum = lor, prod = min = land, max = lor, as NumPy adds bools)
///   integers  every op; a factor must be a whole number
///   floats    sum prod min max avg premul mean
///   complex   sum prod avg premul mean
///   float8    none
void require_reducible(DType dtype, const Reduction& reduction);

}  // namespace samestep
