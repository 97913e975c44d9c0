#pragma once

#include <cstddef>

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "kernels/reduce.h"

/// What isa.cpp asks of the code of one instruction set. Internal to `kernels/`.
namespace samestep::kernels {

/// The arguments of `reduce_into`. Plain pointers: a function of the standard library that is called where
/// the compiler may use AVX could be the copy that the linker keeps for the whole program.
struct ReduceArgs {
  ReduceOp op;
  const Input* inputs;
  std::size_t n_inputs;
  void* const* outs;
  std::size_t n_outs;
  std::size_t count;
  double divisor;  // of avg and mean
};

inline constexpr std::size_t kMaxStepBytes = 256;

/// Where the last elements of a job lie, and the step they are padded to.
struct Tail {
  std::size_t skipped_nbytes;
  std::size_t nbytes;
  std::size_t step_nbytes;  // at most kMaxStepBytes
  std::size_t step_count;
};

/// Calls `run(rule, step)`, where `step` has the elements of `tail` padded with zeros, and stores the result
/// to the outs of `whole`.
void run_padded(const ReduceArgs& whole, const Tail& tail, void (*run)(const void* rule, const ReduceArgs& step),
                const void* rule);

namespace portable {
void reduce_floating_job(DType dtype, const ReduceArgs& job);
bool divide_job(DType dtype, void* data, std::size_t count, double divisor);  // see divide.h
void reduce_integer_job(DType dtype, const ReduceArgs& job);                  // and bools
}  // namespace portable
namespace avx2 {
void reduce_floating_job(DType dtype, const ReduceArgs& job);
bool divide_job(DType dtype, void* data, std::size_t count, double divisor);
}  // namespace avx2
namespace avx512 {
void reduce_floating_job(DType dtype, const ReduceArgs& job);
bool divide_job(DType dtype, void* data, std::size_t count, double divisor);
}  // namespace avx512

}  // namespace samestep::kernels
