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

}  // namespace

void reduce_into(DType dtype, ReduceOp op, std::span<const Input> inputs, std::span<void* const> outs,
                 std::size_t count, std::size_t n_ranks) {
  if (inputs.size() == 1 && n_ranks <= 1 && keeps_one(dtype, op)) {
    return copy_into(static_cast<const std::byte*>(inputs[0].data), outs, count * itemsize(dtype));
  }
  reduce_with_isa(dtype, {op, inputs.data(), inputs.size(), outs.data(), outs.size(), count,
                          n_ranks != 0 ? n_ranks : inputs.size()});
}

}  // namespace samestep::kernels
