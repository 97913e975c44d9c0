#include "kernels/reduce.h"

#include <algorithm>
#include <cstring>

#include "kernels/isa.h"
#include "kernels/stream.h"

namespace samestep::kernels {
namespace {

// Whether a single input is its own result. Not so for land, lor and bools, which give 0 or 1, and where elements are
// multiplied.
bool keeps_one(DType dtype, ReduceOp op) {
  return dtype != DType::bool_ && op != ReduceOp::land && op != ReduceOp::lor && !multiplies(op);
}

void copy_into(const std::byte* data, std::span<void* const> outs, std::size_t nbytes) {
  // With several results, blocks that are still in the L1 cache for the second one.
  const std::size_t piece = outs.size() == 1 ? nbytes : 16 * 1024;
  for (std::size_t first = 0; first < nbytes; first += piece) {
    const std::size_t n = std::min(piece, nbytes - first);
    for (void* const out : outs) {
      if (out != data) copy(static_cast<std::byte*>(out) + first, data + first, n);
    }
  }
}

template <class V>
V loaded(const Input& input, std::size_t at) {
  V values;
  std::memcpy(&values, static_cast<const std::byte*>(input.data) + at, sizeof values);
  return values;
}

/// The bytes of one V from `at` on, summed over one to four inputs. One store: a load of the whole soon after
/// several smaller stores would wait for them (no store forwarding).
template <class V>
void reduce_tiny_element(std::span<const Input> in, void* out, std::size_t at) {
  // The pairwise order of the general kernels, so that the bits are the same.
  V sum = loaded<V>(in[0], at);
  if (in.size() > 1) sum = sum + loaded<V>(in[1], at);
  if (in.size() == 3) sum = sum + loaded<V>(in[2], at);
  if (in.size() == 4) sum = sum + (loaded<V>(in[2], at) + loaded<V>(in[3], at));
  std::memcpy(static_cast<std::byte*>(out) + at, &sum, sizeof sum);
}

template <class Element>
void reduce_tiny(std::span<const Input> in, void* out, std::size_t nbytes) {
  // Sixteen bytes at a time, then eight, then the last element, so that nothing is padded.
  using Four [[gnu::vector_size(16)]] = Element;
  using Two [[gnu::vector_size(8)]] = Element;
  std::size_t at = 0;
  for (; at + sizeof(Four) <= nbytes; at += sizeof(Four)) reduce_tiny_element<Four>(in, out, at);
  if (at + sizeof(Two) <= nbytes) {
    reduce_tiny_element<Two>(in, out, at);
    at += sizeof(Two);
  }
  if (at < nbytes) reduce_tiny_element<Element>(in, out, at);
}

/// Sums of so few elements that it would take longer to find the loop for them. The same bits.
bool reduced_tiny(DType dtype, ReduceOp op, std::span<const Input> in, std::span<void* const> outs, std::size_t count) {
  constexpr std::size_t kMaxTiny = 64;
  const std::size_t nbytes = count * itemsize(dtype);
  if (op != ReduceOp::sum || outs.size() != 1 || in.size() > 4 || nbytes > kMaxTiny) return false;
  if (dtype == DType::float32) {
    reduce_tiny<float>(in, outs[0], nbytes);
  } else if (dtype == DType::float64) {
    reduce_tiny<double>(in, outs[0], nbytes);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void reduce_into(DType dtype, ReduceOp op, std::span<const Input> inputs, std::span<void* const> outs,
                 std::size_t count, double divisor) {
  // An average of one input that is a sum over several ranks still needs its division.
  if (inputs.size() == 1 && divisor <= 1 && keeps_one(dtype, op)) {
    return copy_into(static_cast<const std::byte*>(inputs[0].data), outs, count * itemsize(dtype));
  }
  if (reduced_tiny(dtype, op, inputs, outs, count)) return;
  reduce_with_isa(dtype, {op, inputs.data(), inputs.size(), outs.data(), outs.size(), count,
                          divisor != 0 ? divisor : static_cast<double>(inputs.size())});
}

}  // namespace samestep::kernels
