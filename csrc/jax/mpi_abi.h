#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/reduce_op.h"

/// The binary interface of MPItrampoline, version 2: what jaxlib looks up in the library that MPITRAMPOLINE_LIB names.
/// Handles have the size of a pointer; constants are variables, each of which may be read as a handle or as an int.
#define SAMESTEP_EXPORT extern "C" __attribute__((visibility("default")))
#define SAMESTEP_CONSTANT SAMESTEP_EXPORT const std::uintptr_t

namespace samestep::mpi_abi {

using Handle = std::uintptr_t;

inline constexpr Handle kFirstDType = 0x100, kFirstOp = 0x200, kFirstUnused = 0x1000;
inline constexpr Handle kNull = 0, kWorld = 1;
inline constexpr Handle kUndefined = static_cast<Handle>(-32766), kAny = static_cast<Handle>(-1),
                        kInPlace = static_cast<Handle>(-1), kNobody = static_cast<Handle>(-2);

constexpr Handle handle(DType dtype) { return kFirstDType + static_cast<Handle>(dtype); }
constexpr Handle handle(ReduceOp op) { return kFirstOp + static_cast<Handle>(op); }

/// Throw InvalidArgumentError for a handle of something else.
DType to_dtype(Handle handle);
ReduceOp to_op(Handle handle);

}  // namespace samestep::mpi_abi
