// Every symbol that jaxlib looks up, but the functions of mpi_library.cpp.

#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "core/format.h"
#include "jax/mpi_abi.h"

namespace samestep::mpi_abi {
namespace {

/// As MPI treats errors that nobody handles. Continuing would be worse: the caller may not look at what it gets.
[[noreturn]] void end_in(const char* function) {
  std::fprintf(stderr,
               "samestep: jaxlib has called %s (in MPI: MPI_...), which libsamestep_jax.so does not implement: this "
               "jaxlib is not one that samestep knows. Set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo to go on without "
               "samestep.\n",
               function);
  std::abort();
}

}  // namespace

DType to_dtype(Handle handle) {
  if (handle - kFirstDType >= kDTypeCount) throw InvalidArgumentError(str("MPI datatype ", handle, " is not known"));
  return static_cast<DType>(handle - kFirstDType);
}

ReduceOp to_op(Handle handle) {
  if (handle - kFirstOp >= kReduceOpCount) throw InvalidArgumentError(str("MPI operator ", handle, " is not known"));
  return static_cast<ReduceOp>(handle - kFirstOp);
}

}  // namespace samestep::mpi_abi

using samestep::DType;
using samestep::ReduceOp;
using samestep::mpi_abi::handle;

SAMESTEP_CONSTANT MPIABI_SUCCESS = 0, MPIABI_ERR_OTHER = 1;
SAMESTEP_CONSTANT MPIABI_COMM_NULL = samestep::mpi_abi::kNull, MPIABI_COMM_WORLD = samestep::mpi_abi::kWorld;
SAMESTEP_CONSTANT MPIABI_REQUEST_NULL = samestep::mpi_abi::kNull, MPIABI_IN_PLACE = samestep::mpi_abi::kInPlace;
SAMESTEP_CONSTANT MPIABI_STATUS_IGNORE = 0, MPIABI_STATUSES_IGNORE = 0;
SAMESTEP_CONSTANT MPIABI_UNDEFINED = samestep::mpi_abi::kUndefined, MPIABI_PROC_NULL = samestep::mpi_abi::kNobody;
SAMESTEP_CONSTANT MPIABI_ANY_SOURCE = samestep::mpi_abi::kAny, MPIABI_ANY_TAG = samestep::mpi_abi::kAny;
SAMESTEP_CONSTANT MPIABI_THREAD_SINGLE = 0, MPIABI_THREAD_FUNNELED = 1, MPIABI_THREAD_SERIALIZED = 2,
                  MPIABI_THREAD_MULTIPLE = 3;
SAMESTEP_CONSTANT MPIABI_SUM = handle(ReduceOp::sum), MPIABI_PROD = handle(ReduceOp::prod);
SAMESTEP_CONSTANT MPIABI_MIN = handle(ReduceOp::min), MPIABI_MAX = handle(ReduceOp::max);
SAMESTEP_CONSTANT MPIABI_BYTE = handle(DType::uint8), MPIABI_INT8_T = handle(DType::int8),
                  MPIABI_INT16_T = handle(DType::int16), MPIABI_INT32_T = handle(DType::int32),
                  MPIABI_INT64_T = handle(DType::int64), MPIABI_UINT8_T = handle(DType::uint8),
                  MPIABI_UINT16_T = handle(DType::uint16), MPIABI_UINT32_T = handle(DType::uint32),
                  MPIABI_UINT64_T = handle(DType::uint64), MPIABI_FLOAT = handle(DType::float32),
                  MPIABI_DOUBLE = handle(DType::float64), MPIABI_C_COMPLEX = handle(DType::complex64),
                  MPIABI_C_FLOAT_COMPLEX = handle(DType::complex64),
                  MPIABI_C_DOUBLE_COMPLEX = handle(DType::complex128);

// Each unused constant has a value of its own, above those of datatypes and operators, so that none is mistaken for
// one.
#define CONSTANT(name) SAMESTEP_CONSTANT name = samestep::mpi_abi::kFirstUnused + __COUNTER__;
#define MPI(name) CONSTANT(MPIABI_##name)
#include "jax/mpi_constants.inc"

// Without parameters: jaxlib finds symbols by name alone, and the function never returns.
#undef MPI
#define MPI(name) FUNCTION(MPIABI_##name)
#define FUNCTION(name) \
  SAMESTEP_EXPORT int name() { samestep::mpi_abi::end_in(#name); }
#include "jax/mpi_functions.inc"

// The version of the interface, which jaxlib compares with its own, and of the library.
SAMESTEP_EXPORT const int mpiabi_version_major = 2, mpiabi_version_minor = 10, mpiabi_version_patch = 0;
SAMESTEP_EXPORT const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 10, mpiwrapper_version_patch = 0;
SAMESTEP_EXPORT void mpiwrapper_export_fortran_constants_() {}
