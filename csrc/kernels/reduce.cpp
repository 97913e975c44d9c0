#include "kernels/reduce.h"

#include <algorithm>
#include <cstring>

#include "kernels/isa.h"

namespace samestep::kernels {
namespace {

// Whether a single input is its own result: land, lor and bools make 0 or 1 of it, premul scales it.
bool keeps_one(DType dtype, ReduceOp op) {
  return dtype != DType::bool_ && op != ReduceOp::land && op != ReduceOp::lor && op != ReduceOp::premul;
}

void copy_into(const std::byte* data, std::span<void* const> outs, std::size_t nbytes) {
  // With several results, pieces that are still in the first-level cache for the second.
  const std::size_t piece = outs.size() == 1 ? nbytes : 16 * 1024;
  for (std::size_t first = 0; first < nbytes; first += piece) {
    const std::size_t n = std::min(piece, nbytes - first);
    for (void* const out : outs) {
      if (out != data) std::memcpy(static_cast<std::byte*>(out) + first, data + first, n);
    }
  }
}

/// Of one to four inputs, the elements of which fill a V. One store: what is stored in parts would be waited for by
/// whoever soon loads it whole.
template <class V>
void sum_one(std::span<const Input> in, void* out) {
  const auto load = [&](std::size_t i) {
    V values;
    std::memcpy(&values, in[i].data, sizeof values);
    return values;
  };
  V sum = load(0);
  if (in.size() > 1) sum = sum + load(1);
  if (in.size() == 3) sum = sum + load(2);
  if (in.size() == 4) sum = sum + (load(2) + load(3));
  std::memcpy(out, &sum, sizeof sum);
}

/// Sums of so few elements that it would take longer to find the loop for them. The same bits.
bool summed_at_once(DType dtype, ReduceOp op, std::span<const Input> in, std::span<void* const> outs,
                    std::size_t count) {
  using Floats [[gnu::vector_size(16)]] = float;
  using Doubles [[gnu::vector_size(16)]] = double;
  using TwoFloats [[gnu::vector_size(8)]] = float;
  if (op != ReduceOp::sum || outs.size() != 1 || in.size() > 4 || count > 4) return false;
  void (*sum)(std::span<const Input>, void*) = nullptr;
  if (dtype == DType::float32) {
    sum = count == 4 ? sum_one<Floats> : count == 2 ? sum_one<TwoFloats> : count == 1 ? sum_one<float> : nullptr;
  } else if (dtype == DType::float64) {
    sum = count == 2 ? sum_one<Doubles> : count == 1 ? sum_one<double> : nullptr;
  }
  if (sum != nullptr) sum(in, outs[0]);
  return sum != nullptr;
}

}  // namespace

void reduce_into(DType dtype, ReduceOp op, std::span<const Input> inputs, std::span<void* const> outs,
                 std::size_t count, std::size_t n_ranks) {
  if (inputs.size() == 1 && n_ranks <= 1 && keeps_one(dtype, op)) {
    return copy_into(static_cast<const std::byte*>(inputs[0].data), outs, count * itemsize(dtype));
  }
  if (summed_at_once(dtype, op, inputs, outs, count)) return;
  reduce_with_isa(dtype, {op, inputs.data(), inputs.size(), outs.data(), outs.size(), count,
                          n_ranks != 0 ? n_ranks : inputs.size()});
}

}  // namespace samestep::kernels
