#pragma once

#include <cstddef>
#include <optional>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace samestep {

/// A reduction in NCCL's terms.
struct NcclReduction {
  int type;                 ///< of nccl_abi::Type
  std::size_t per_element;  ///< elements of that type in one of ours: 2 for complex numbers
  int op;                   ///< of nccl_abi::Op
  bool scaled;              ///< the sum of factor * x instead of `op`
  std::size_t item = 0;     ///< bytes of an element of that type
  bool alone = false;       ///< of a communicator of one rank
};

/// Maps bool to uint8 (0 and 1) and complex numbers to pairs. Returns nullopt for what the host must reduce: types that
/// NCCL lacks (int16), operators that it lacks (bitwise, products of complex numbers), averages of integers, which it
/// does not compute exactly, and averages of float16 and bfloat16: it multiplies by 1 / n, rounded to that type, and
/// rounds each product and each addition. An average of one rank is a sum, which NCCL copies. Pure.
std::optional<NcclReduction> to_nccl_reduction(DType dtype, const Reduction& reduction, int n_ranks);

}  // namespace samestep
