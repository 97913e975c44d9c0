#include <cstring>
#include <vector>

#include "kernels/reduce_args.h"

namespace samestep::kernels {
namespace {

// This source is compiled for the baseline of the processor, and so may call functions of the standard library; see
// ReduceArgs for why the kernels may not.
constexpr std::size_t kMaxOnStack = 8;  // inputs for which no memory is allocated

void run_in(std::byte* padded, Input* inputs, const ReduceArgs& whole, const Tail& tail,
            void (*run)(const void* rule, const ReduceArgs& step), const void* rule) {
  for (std::size_t rank = 0; rank < whole.n_inputs; ++rank) {
    std::byte* const to = padded + rank * kMaxStepBytes;
    std::memcpy(to, static_cast<const std::byte*>(whole.inputs[rank].data) + tail.skipped_nbytes, tail.nbytes);
    std::memset(to + tail.nbytes, 0, tail.step_nbytes - tail.nbytes);
    inputs[rank] = {to, whole.inputs[rank].factor};
  }
  // Over the first input, since the loop reads a step before it stores any of it. What the zeros give is not copied
  // out.
  void* const out = padded;
  run(rule, {whole.op, inputs, whole.n_inputs, &out, 1, tail.step_count, whole.divisor});
  for (std::size_t k = 0; k < whole.n_outs; ++k) {
    std::memcpy(static_cast<std::byte*>(whole.outs[k]) + tail.skipped_nbytes, out, tail.nbytes);
  }
}

}  // namespace

void run_padded(const ReduceArgs& whole, const Tail& tail, void (*run)(const void* rule, const ReduceArgs& step),
                const void* rule) {
  if (whole.n_inputs <= kMaxOnStack) {
    alignas(64) std::byte padded[kMaxOnStack * kMaxStepBytes];
    Input inputs[kMaxOnStack];
    return run_in(padded, inputs, whole, tail, run, rule);
  }
  std::vector<std::byte> padded(whole.n_inputs * kMaxStepBytes);
  std::vector<Input> inputs(whole.n_inputs);
  run_in(padded.data(), inputs.data(), whole, tail, run, rule);
}

}  // namespace samestep::kernels
