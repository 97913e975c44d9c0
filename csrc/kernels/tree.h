#pragma once

#include <cstddef>

#include "kernels/rules.h"

/// Runs a rule of `kernels/rules.h` over the buffers of n ranks in pairwise order of rank. Internal to
/// `kernels/`.
///
/// For up to four ranks, one pass reads all buffers and stores to all results. More ranks are split at the largest
/// power of two below their number; the partial results are combined in blocks that stay in the L1 cache.
///
/// A loop runs in *steps* of a few packs. It reads a whole step before it stores any of it, so results may alias
/// inputs. The elements after the last whole step are copied to a buffer and padded with zeros, so that one loop for
/// each shape of a tree is enough.
namespace samestep::kernels::SAMESTEP_ISA {

inline constexpr std::size_t kMaxFused = 4;
inline constexpr std::size_t kBlockBytes = 4096;       // of values
inline constexpr std::size_t kInputBytes = 16 * 1024;  // of a block of all inputs

SAMESTEP_INLINE std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

template <class R>
using ValuesOf = typename R::Format::Values;
template <class R>
using ElementOf = typename R::Format::Element;

/// The packs of a step, whose results all stay in registers, and the elements of a pack, a step and a block.
template <class R>
inline constexpr std::size_t kPacks = 4;
template <class R>
inline constexpr std::size_t kPack = R::Format::kCount;
template <class R>
inline constexpr std::size_t kStep = kPacks<R> * kPack<R>;
template <class R>
inline constexpr std::size_t kBlock = kBlockBytes / sizeof(ValuesOf<R>) * kPack<R>;

// ---- Trees: functions of i, the first element of a pack.

template <class Operator, class Left, class Right>
struct Merge {
  Left left;
  Right right;
  SAMESTEP_INLINE auto operator()(std::size_t i) const {
    auto a = left(i);
    const auto b = right(i);
    for (std::size_t n = 0; n < sizeof a.part / sizeof a.part[0]; ++n) {
      a.part[n] = Operator::combine(a.part[n], b.part[n]);
    }
    return a;
  }
};

template <class Operator, class Left, class Right>
SAMESTEP_INLINE Merge<Operator, Left, Right> merge(Left left, Right right) {
  return {left, right};
}

/// The combined values of a block.
template <class R>
struct Combined {
  const ValuesOf<R>* packs;
  SAMESTEP_INLINE ValuesOf<R> operator()(std::size_t i) const { return packs[i / kPack<R>]; }
};

/// Calls `use` with the tree over `n` = 1 to kMaxFused inputs, beginning with element 0.
template <class R, class Use>
SAMESTEP_INLINE void with_tree(const Input* inputs, std::size_t n, const Use& use) {
  using Op = typename R::Operator;
  const auto term = [&](std::size_t rank) { return R::term(inputs[rank], 0); };
  switch (n) {
    case 1:
      return use(term(0));
    case 2:
      return use(merge<Op>(term(0), term(1)));
    case 3:
      return use(merge<Op>(merge<Op>(term(0), term(1)), term(2)));
    case 4:
      return use(merge<Op>(merge<Op>(term(0), term(1)), merge<Op>(term(2), term(3))));
    default:
      return;
  }
}

// ---- Sinks: where the values of one step go.

template <class R>
struct IntoBlock {
  ValuesOf<R>* packs;

  SAMESTEP_INLINE void operator()(const ValuesOf<R> (&values)[kPacks<R>], std::size_t i) const {
    for (std::size_t n = 0; n < kPacks<R>; ++n) packs[i / kPack<R> + n] = values[n];
  }
};

template <class R>
struct IntoOuts {
  R rule;
  void* const* outs;
  std::size_t n_outs;
  std::size_t first;  // the output element that corresponds to element 0 of the tree

  SAMESTEP_INLINE void operator()(const ValuesOf<R> (&values)[kPacks<R>], std::size_t i) const {
    typename R::Format::Packed packed[kPacks<R>];
#pragma GCC unroll 4
    for (std::size_t n = 0; n < kPacks<R>; ++n) packed[n] = rule.result(values[n]);
    for (std::size_t k = 0; k < n_outs; ++k) {
      std::byte* const to = static_cast<std::byte*>(outs[k]) + (first + i) * sizeof(ElementOf<R>);
#pragma GCC unroll 4
      for (std::size_t n = 0; n < kPacks<R>; ++n) R::Format::write(packed[n], to + n * kPack<R> * sizeof(ElementOf<R>));
    }
  }
};

// ---- Loops.

template <class R, class Tree, class Sink>
SAMESTEP_INLINE void run_steps(Tree tree, Sink sink, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kStep<R>) {
    ValuesOf<R> values[kPacks<R>];
#pragma GCC unroll 4
    for (std::size_t n = 0; n < kPacks<R>; ++n) values[n] = tree(i + n * kPack<R>);
    sink(values, i);
  }
}

/// Up to kMaxFused ranks, whole steps.
template <class R>
void run_fused(R rule, const ReduceArgs& job) {
  const IntoOuts<R> sink = {rule, job.outs, job.n_outs, 0};
  with_tree<R>(job.inputs, job.n_inputs, [=, count = job.count](auto tree) { run_steps<R>(tree, sink, count); });
}

/// packs[i] = the unfinished reduction of pack i from element `first` on. The stack holds a block for each
/// level of the tree above the fused ones.
template <class R>
void accumulate(const Input* inputs, std::size_t n, std::size_t first, std::size_t count, ValuesOf<R>* packs) {
  using Op = typename R::Operator;
  const auto term = [=](std::size_t rank) { return R::term(inputs[rank], first); };
  const IntoBlock<R> sink = {packs};
  if (n == 1) return run_steps<R>(term(0), sink, count);
  if (n == 4) return run_steps<R>(merge<Op>(merge<Op>(term(0), term(1)), merge<Op>(term(2), term(3))), sink, count);
  std::size_t cut = 1;
  while (2 * cut < n) cut *= 2;
  ValuesOf<R> right[kBlock<R> / kPack<R>];
  accumulate<R>(inputs, cut, first, count, packs);
  accumulate<R>(inputs + cut, n - cut, first, count, right);
  run_steps<R>(merge<Op>(Combined<R>{packs}, Combined<R>{right}), sink, count);
}

/// Any number of ranks, whole steps.
template <class R>
void run_blocks(R rule, const ReduceArgs& job) {
  ValuesOf<R> packs[kBlock<R> / kPack<R>];
  // The inputs of a block are still in the L1 cache when results are stored over them.
  const std::size_t cached_steps = kInputBytes / (job.n_inputs * kStep<R> * sizeof(ElementOf<R>));
  const std::size_t block = cached_steps == 0 ? kStep<R> : least(cached_steps * kStep<R>, kBlock<R>);
  for (std::size_t first = 0; first < job.count; first += block) {
    const std::size_t count = least(block, job.count - first);
    accumulate<R>(job.inputs, job.n_inputs, first, count, packs);
    run_steps<R>(Combined<R>{packs}, IntoOuts<R>{rule, job.outs, job.n_outs, first}, count);
  }
}

template <class R>
[[gnu::noinline]] void run_whole_steps(const void* rule, const ReduceArgs& job) {
  const R& r = *static_cast<const R*>(rule);
  job.n_inputs <= kMaxFused ? run_fused(r, job) : run_blocks(r, job);
}

/// `reduce_into` of kernels/reduce.h for one rule.
template <class R>
void run(R rule, ReduceArgs job) {
  constexpr std::size_t kItemsize = sizeof(ElementOf<R>);
  static_assert(kStep<R> * kItemsize <= kMaxStepBytes);
  const ReduceArgs whole = job;
  const std::size_t remainder = job.count % kStep<R>;
  job.count -= remainder;
  if (job.count != 0) run_whole_steps<R>(&rule, job);
  const Tail tail = {job.count * kItemsize, remainder * kItemsize, kStep<R> * kItemsize, kStep<R>};
  if (remainder != 0) run_padded(whole, tail, run_whole_steps<R>, &rule);
}

}  // namespace samestep::kernels::SAMESTEP_ISA
