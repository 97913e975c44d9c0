#include "nccl/nccl_reduction.h"

#include <algorithm>
#include <array>

#include "nccl/nccl_library.h"

namespace samestep {
namespace {

struct TypePair {
  DType ours;
  int nccl;
};
// Complex numbers are pairs of NCCL's.
constexpr std::array kTypes = {
    TypePair{DType::bool_, nccl_abi::kUint8},        TypePair{DType::uint8, nccl_abi::kUint8},
    TypePair{DType::int8, nccl_abi::kInt8},          TypePair{DType::int32, nccl_abi::kInt32},
    TypePair{DType::uint32, nccl_abi::kUint32},      TypePair{DType::int64, nccl_abi::kInt64},
    TypePair{DType::uint64, nccl_abi::kUint64},      TypePair{DType::float16, nccl_abi::kFloat16},
    TypePair{DType::bfloat16, nccl_abi::kBfloat16},  TypePair{DType::float32, nccl_abi::kFloat32},
    TypePair{DType::complex64, nccl_abi::kFloat32},  TypePair{DType::float64, nccl_abi::kFloat64},
    TypePair{DType::complex128, nccl_abi::kFloat64},
};

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
    // Nor do complex numbers have an order: the least of each part would be another number.
    case ReduceOp::min:
      return is_complex(dtype) ? std::nullopt : std::optional<int>(nccl_abi::kMin);
    case ReduceOp::max:
      return is_complex(dtype) ? std::nullopt : std::optional<int>(nccl_abi::kMax);
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
  const auto* const type = std::ranges::find(kTypes, dtype, &TypePair::ours);
  std::optional<int> op = dtype == DType::bool_ ? op_of_bools(reduction.op) : op_of_numbers(dtype, reduction.op);
  if (type == kTypes.end() || !op) return std::nullopt;
  if (alone && *op == nccl_abi::kAvg) op = nccl_abi::kSum;
  const std::size_t per_element = is_complex(dtype) ? 2 : 1;
  const bool scaled = reduction.op == ReduceOp::premul;
  return NcclReduction{type->nccl, per_element, *op, scaled, itemsize(dtype) / per_element, alone};
}

}  // namespace samestep
