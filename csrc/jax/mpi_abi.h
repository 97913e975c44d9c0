#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/reduce_op.h"

/// The binary interface of MPItrampoline, version 2: what jaxlib looks up in the library that MPITRAMPOLINE_LIB names.
/// Handles are words; constants are variables, each of which may be read as a word or as an int.
#define SAMESTEP_EXPORT extern "C" __attribute__((visibility("default")))
#define SAMESTEP_CONSTANT SAMESTEP_EXPORT const std::uintptr_t

namespace samestep::mpi_abi {

using Word = std::uintptr_t;

inline constexpr Word kFirstDType = 0x100, kFirstOp = 0x200, kFirstUnused = 0x1000;
inline constexpr Word kNull = 0, kWorld = 1;
inline constexpr Word kUndefined = static_cast<Word>(-32766), kAny = static_cast<Word>(-1),
                      kInPlace = static_cast<Word>(-1), kNobody = static_cast<Word>(-2);

constexpr Word handle(DType dtype) { return kFirstDType + static_cast<Word>(dtype); }
constexpr Word handle(ReduceOp op) { return kFirstOp + static_cast<Word>(op); }

/// Throw InvalidArgumentError for a handle of something else.
DType to_dtype(Word handle);
ReduceOp to_op(Word handle);

}  // namespace samestep::mpi_abi
