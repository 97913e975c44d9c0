/// The kernels of floating-point and complex types for one instruction set. Included once by the source of each, which
/// names it by SAMESTEP_ISA; CMakeLists.txt gives that source its compiler flags.
///
/// Whatever is instantiated or inlined from here lies in the namespace of that name or is always inlined.
/// A function that two sources share would be kept from either, and might crash an older processor.
#include "kernels/floating.h"
#include "kernels/quotient.h"
#include "kernels/reduce_args.h"

namespace samestep::kernels::SAMESTEP_ISA {

void reduce_floating_job(DType dtype, const ReduceArgs& job) {
  switch (dtype) {
    case DType::float16:
      return reduce_real<Float16>(job);
    case DType::bfloat16:
      return reduce_real<BFloat16>(job);
    case DType::float32:
      return reduce_real<Plain<float>>(job);
    case DType::float64:
      return reduce_real<Plain<double>>(job);
    case DType::complex64:
      return reduce_complex<float>(job);
    case DType::complex128:
      return reduce_complex<double>(job);
    default:
      return;
  }
}

bool divide_job(DType dtype, void* data, std::size_t count, double divisor) {
  std::byte* const bytes = static_cast<std::byte*>(data);
  return dtype == DType::float32 ? divide_all<float>(bytes, count, static_cast<float>(divisor))
                                 : divide_all<double>(bytes, count, divisor);
}

}  // namespace samestep::kernels::SAMESTEP_ISA
