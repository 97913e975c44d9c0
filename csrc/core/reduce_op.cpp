#include "core/reduce_op.h"

#include <cmath>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

// What fits the type, for people; nullptr where `op` does.
const char* misfit(DType dtype, ReduceOp op) {
  const bool bitwise = op >= ReduceOp::band && op <= ReduceOp::lor;
  if (is_float8(dtype)) return "float8 arrays can be moved but not reduced: convert them to float16 or float32 first";
  if (dtype == DType::bool_ && (divides(op) || multiplies(op))) {
    return "bool arrays have sum (= lor), prod (= land), min, max, band, bor, bxor, land and lor";
  }
  if (is_floating(dtype) && bitwise) return "floating-point arrays have sum, prod, min, max, avg and premul";
  if (is_complex(dtype) && (bitwise || op == ReduceOp::min || op == ReduceOp::max)) {
    return "complex arrays have sum, prod, avg and premul";
  }
  return nullptr;
}

// The limits are exact doubles: -2^63 is an int64, and 2^63 is the first number that is not.
bool is_int64(double x) { return x == std::trunc(x) && x >= -0x1p63 && x < 0x1p63; }

}  // namespace

void require_reducible(DType dtype, const Reduction& reduction) {
  if (const char* const cure = misfit(dtype, reduction.op)) {
    throw InvalidArgumentError(str("op ", name(reduction.op), " does not fit ", name(dtype), ": ", cure));
  }
  if (multiplies(reduction.op) && is_integer(dtype) && !is_int64(reduction.factor)) {
    throw InvalidArgumentError(str("op premul(", reduction.factor, ") does not fit ", name(dtype),
                                   ": integer arrays need a whole factor in [-2^63, 2^63)"));
  }
}

}  // namespace samestep
