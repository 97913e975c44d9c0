#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace samestep {

enum class ReduceOp : std::uint8_t { sum, prod, min, max, avg, band, bor, bxor, land, lor, premul };

inline constexpr int kReduceOpCount = 11;

/// Lower-case name, e.g. "sum"; the one users write.
constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view kNames[kReduceOpCount] = {"sum", "prod", "min",  "max", "avg",   "band",
                                                       "bor", "bxor", "land", "lor", "premul"};
  return kNames[static_cast<int>(op)];
}

/// How the elements of all ranks are combined: an operator and, for `premul`, this rank's factor.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1.0;  ///< `premul` only: the result is the sum over ranks of factor * x
};

/// Throws InvalidArgumentError, naming both, if `op` is not defined for `dtype`. It is defined for:
///   bool      every op but avg and premul (sum = lor, prod = min = land, max = lor, as NumPy adds bools)
///   integers  every op; a `premul` factor must be a whole number
///   floats    sum prod min max avg premul
///   complex   sum prod avg premul
///   float8    none
void require_reducible(DType dtype, const Reduction& reduction);

}  // namespace samestep
