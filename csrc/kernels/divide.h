#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace samestep::kernels {

/// data[i] = data[i] / divisor, for i < count; the divisor is rounded to `dtype` first. Returns whether all quotients
/// are finite. One pass over memory; the same bits with every instruction set.
///
/// `dtype`: float32 or float64. Addresses need no alignment.
bool divide_in_place(DType dtype, void* data, std::size_t count, double divisor);

}  // namespace samestep::kernels
