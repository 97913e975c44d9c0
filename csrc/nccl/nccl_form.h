#pragma once

#include <cstddef>
#include <optional>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace samestep {

/// How NCCL is to see a reduction.
struct NcclForm {
  int type;                 ///< of nccl_abi::Type
  std::size_t per_element;  ///< elements of that type in one of ours: 2 for complex numbers
  int op;                   ///< of nccl_abi::Op
  bool scaled;              ///< the sum of factor * x instead of `op`
};

/// bool goes as uint8 (0 and 1), complex numbers as pairs. Nothing where NCCL has no such type (int16), no such
/// operator (bitwise, a product of complex numbers) or computes another result (an average of integers, which is to be
/// exact): these are for the host. Pure.
std::optional<NcclForm> nccl_form(DType dtype, const Reduction& reduction);

}  // namespace samestep
