#pragma once

#include "kernels/rules.h"
#include "kernels/tree.h"

/// The operators of floating-point and complex types. Internal to `kernels/`.
namespace samestep::kernels::SAMESTEP_ISA {

template <class Format>
void reduce_real(const ReduceArgs& job) {
  using Value = typename Format::Value;
  switch (job.op) {
    case ReduceOp::sum:
      return run(Rule<Format, Plus>{}, job);
    case ReduceOp::avg:
      return run(Rule<Format, Plus, Multiply<Value>>{Multiply<Value>{static_cast<Value>(1.0 / job.divisor)}}, job);
    case ReduceOp::premul:
      return run(PremulRule<Format>{}, job);
    case ReduceOp::mean:
      return run(MeanRule<Format, Divide<Value>>{{{static_cast<Value>(job.divisor)}}}, job);
    case ReduceOp::prod:
      return run(Rule<Format, Times>{}, job);
    case ReduceOp::min:
      return run(Rule<Format, Least>{}, job);
    case ReduceOp::max:
      return run(Rule<Format, Greatest>{}, job);
    default:
      return;
  }
}

// All but the product treat the real and the imaginary part the same.
template <class Real>
void reduce_complex(ReduceArgs job) {
  if (job.op == ReduceOp::prod) return run(Rule<Single<Complex<Real>>, Times>{}, job);
  job.count *= 2;
  reduce_real<Plain<Real>>(job);
}

}  // namespace samestep::kernels::SAMESTEP_ISA
