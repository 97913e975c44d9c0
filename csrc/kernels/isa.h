#pragma once

#include <string_view>
#include <vector>

#include "kernels/reduce_args.h"

/// The instruction sets for which the floating-point kernels are compiled. All of them give the same bits.
namespace samestep::kernels {

/// What this processor can run, slowest first: "portable" (SSE2 or NEON, whatever the compiler's baseline
/// is) and, on x86-64, "avx2" (with F16C) and "avx512" (F, BW, VL and DQ).
std::vector<std::string_view> supported_isas();

/// The one in use: the last of `supported_isas()` unless `select_isa` was called.
std::string_view isa_name();

/// Makes all threads use `name` from now on. Throws InvalidArgumentError, listing what this processor can
/// run, for any other name.
void select_isa(std::string_view name);

/// Runs `job` with the instruction set in use. Internal to `kernels/`.
void reduce_with_isa(DType dtype, const ReduceArgs& job);

}  // namespace samestep::kernels
