#pragma once

#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace samestep::kernels {

/// One rank's elements, and its factor where the operator is `premul` or `mean`.
struct Input {
  const void* data = nullptr;
  double factor = 1.0;
};

/// outs[k][i] = the reduction of inputs[0][i], inputs[1][i], ... in pairwise order of rank:
/// ((0+1)+(2+3))+..., for every i < count and every k. `inputs` holds one entry per rank, in order of
/// rank; at least one. Addresses need no alignment.
///
/// Each of `outs` may be the same address as one of the inputs, but must not overlap them, nor each
/// other, otherwise. Up to four inputs are one pass over memory: what is finished is stored to all of
/// `outs` from registers. More inputs meet in blocks that stay in the first-level cache.
///
/// Numerics: float16 and bfloat16 are widened to float32, combined, and rounded once to nearest even.
/// Min and max return NaN if any input is NaN. Avg multiplies the finished sum by 1/n once for floats
/// and complex, and floor-divides the exact sum for integers, which no number of ranks overflows.
/// Premul multiplies each term in float32 or float64. Integer sum, prod and premul wrap modulo 2^bits.
/// Mean does so and divides the finished sum once; integers are exact if the sum of factors is below 2^53, and
/// rounded down. An input of the factor 0 changes no bit of the sum, whatever it holds.
/// Land and lor give 0 or 1; bools count as 0 or 1 whatever their byte. Complex prod is (a+bi)(c+di) by
/// the four-multiplication formula.
///
/// The bits of element i do not depend on `count`, on i, on how a buffer is cut into calls, or on the
/// instruction set of `kernels/isa.h` (a NaN is NaN everywhere; which of them is left open).
/// `require_reducible` has been called: other combinations write nothing.
///
/// `divisor`: of avg and mean; 0 = inputs.size(). Whole for integers.
void reduce_into(DType dtype, ReduceOp op, std::span<const Input> inputs, std::span<void* const> outs,
                 std::size_t count, double divisor = 0);

/// `reduce_into` for one result.
inline void reduce(DType dtype, ReduceOp op, std::span<const Input> inputs, void* out, std::size_t count,
                   double divisor = 0) {
  reduce_into(dtype, op, inputs, {&out, 1}, count, divisor);
}

}  // namespace samestep::kernels
