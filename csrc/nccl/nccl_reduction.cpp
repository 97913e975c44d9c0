#include "nccl/nccl_reduction.h"

#include "nccl/nccl_library.h"

namespace samestep {
namespace {

std::optional<int> nccl_type(DType dtype) {
  using namespace nccl_abi;
  switch (dtype) {
    case DType::bool_:
    case DType::uint8:
      return kUint8;
    case DType::int8:
      return kInt8;
    case DType::int32:
      return kInt32;
    case DType::uint32:
      return kUint32;
    case DType::int64:
      return kInt64;
    case DType::uint64:
      return kUint64;
    case DType::float16:
      return kFloat16;
    case DType::bfloat16:
      return kBfloat16;
    case DType::float32:
    case DType::complex64:
      return kFloat32;
    case DType::float64:
    case DType::complex128:
      return kFloat64;
    default:
      return std::nullopt;
  }
}

/// For bool as uint8, whose values are 0 and 1.
std::optional<int> op_of_bools(ReduceOp op) {
  using enum ReduceOp;
  if (op == sum || op == max || op == bor || op == lor) return nccl_abi::kMax;
  if (op == prod || op == min || op == band || op == land) return nccl_abi::kMin;
  return std::nullopt;
}

std::optional<int> op_of_numbers(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return nccl_abi::kSum;
    case ReduceOp::prod:
      // A complex number is a pair of reals to NCCL. Sums and real factors work on each of the two; products do not.
      return is_complex(dtype) ? std::nullopt : std::optional<int>(nccl_abi::kProd);
    case ReduceOp::min:
      return nccl_abi::kMin;
    case ReduceOp::max:
      return nccl_abi::kMax;
    case ReduceOp::avg:
      return is_integer(dtype) || itemsize(dtype) == 2 ? std::nullopt : std::optional<int>(nccl_abi::kAvg);
    case ReduceOp::premul:
      // The scaled sum of nccl_calls replaces this operator; see NcclReduction::scaled.
      return is_integer(dtype) ? std::nullopt : std::optional<int>(nccl_abi::kSum);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<NcclReduction> to_nccl_reduction(DType dtype, const Reduction& reduction, int n_ranks) {
  const bool alone = n_ranks == 1;
  const std::optional<int> type = nccl_type(dtype);
  std::optional<int> op = dtype == DType::bool_ ? op_of_bools(reduction.op) : op_of_numbers(dtype, reduction.op);
  if (!type || !op) return std::nullopt;
  if (alone && *op == nccl_abi::kAvg) op = nccl_abi::kSum;
  const std::size_t per_element = is_complex(dtype) ? 2 : 1;
  const bool scaled = reduction.op == ReduceOp::premul;
  return NcclReduction{*type, per_element, *op, scaled, itemsize(dtype) / per_element, alone};
}

}  // namespace samestep
