#define SAMESTEP_ISA portable  // for all: longer vectors do not speed up sums of integers

#include <cstdint>
#include <type_traits>

#include "kernels/reduce_args.h"
#include "kernels/rules.h"
#include "kernels/tree.h"

namespace samestep::kernels::portable {
namespace {

// The operators whose result does not depend on the sign: for both types of one width.
template <class Unsigned>
void reduce_modular(const ReduceArgs& job) {
  switch (job.op) {
    case ReduceOp::sum:
      return run(Rule<Plain<Unsigned>, Plus>{}, job);
    case ReduceOp::premul:
      return run(PremulRule<Plain<Unsigned>>{}, job);
    case ReduceOp::prod:
      return run(Rule<Plain<Unsigned>, Times>{}, job);
    case ReduceOp::land:
      return run(Rule<Truth<Unsigned>, And>{}, job);
    case ReduceOp::lor:
      return run(Rule<Truth<Unsigned>, Or>{}, job);
    default:
      return;
  }
}

template <class Integer>
void reduce_ordered(const ReduceArgs& job) {
  // An average is the exact sum with one division at the end, so the sum needs a wider type.
  using Sum = typename Wide<Integer>::Value;
  const auto n_ranks = static_cast<std::int32_t>(job.divisor);
  switch (job.op) {
    case ReduceOp::min:
      return run(Rule<Plain<Integer>, Least>{}, job);
    case ReduceOp::max:
      return run(Rule<Plain<Integer>, Greatest>{}, job);
    case ReduceOp::avg:
      return run(Rule<Wide<Integer>, Plus, FloorDivide<Sum>>{{n_ranks}}, job);
    case ReduceOp::mean:
      return run(
          MeanRule<Wide<Integer, Int128>, FloorDivide<Int128, std::int64_t>>{
              {{static_cast<std::int64_t>(job.divisor)}}},
          job);
    default:
      return;
  }
}

// The same for all types: `job.count` is bytes.
void reduce_bitwise(const ReduceArgs& job) {
  switch (job.op) {
    case ReduceOp::band:
      return run(Rule<Plain<std::uint8_t>, And>{}, job);
    case ReduceOp::bor:
      return run(Rule<Plain<std::uint8_t>, Or>{}, job);
    case ReduceOp::bxor:
      return run(Rule<Plain<std::uint8_t>, Xor>{}, job);
    default:
      return;
  }
}

template <class Integer>
void reduce_integer(ReduceArgs job) {
  switch (job.op) {
    case ReduceOp::min:
    case ReduceOp::max:
    case ReduceOp::avg:
    case ReduceOp::mean:
      return reduce_ordered<Integer>(job);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      // Bits do not depend on the width of their element, so that one loop over bytes serves all types.
      job.count *= sizeof(Integer);
      return reduce_bitwise(job);
    default:
      return reduce_modular<std::make_unsigned_t<Integer>>(job);
  }
}

void reduce_bool(const ReduceArgs& job) {
  // As in NumPy, where the sum of bools is their `or`.
  switch (job.op) {
    case ReduceOp::prod:
    case ReduceOp::min:
    case ReduceOp::band:
    case ReduceOp::land:
      return run(Rule<Truth<std::uint8_t>, And>{}, job);
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
    case ReduceOp::lor:
      return run(Rule<Truth<std::uint8_t>, Or>{}, job);
    case ReduceOp::bxor:
      return run(Rule<Truth<std::uint8_t>, Xor>{}, job);
    default:
      return;
  }
}

}  // namespace

void reduce_integer_job(DType dtype, const ReduceArgs& job) {
  switch (dtype) {
    case DType::bool_:
      return reduce_bool(job);
    case DType::int8:
      return reduce_integer<std::int8_t>(job);
    case DType::int16:
      return reduce_integer<std::int16_t>(job);
    case DType::int32:
      return reduce_integer<std::int32_t>(job);
    case DType::int64:
      return reduce_integer<std::int64_t>(job);
    case DType::uint8:
      return reduce_integer<std::uint8_t>(job);
    case DType::uint16:
      return reduce_integer<std::uint16_t>(job);
    case DType::uint32:
      return reduce_integer<std::uint32_t>(job);
    case DType::uint64:
      return reduce_integer<std::uint64_t>(job);
    default:
      return;
  }
}

}  // namespace samestep::kernels::portable
