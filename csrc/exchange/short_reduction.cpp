#include "exchange/short_reduction.h"

#include <array>
#include <cstring>

#include "kernels/reduce.h"

namespace samestep {
namespace {

constexpr std::size_t kFactor = sizeof(double);  // goes before the elements where the operator is premul

/// Do all ranks hear the same? Also what only the root needs, where nothing can be told to it alone.
bool is_told_to_all(const Meeting& meeting, Verb verb) {
  return verb == Verb::all_reduce || (verb == Verb::reduce && meeting.limit_of_parts() == 0);
}

}  // namespace

bool ShortReduction::fits(Engine& engine, Verb verb, std::size_t nbytes) {
  const Meeting& meeting = engine.meeting();
  return nbytes + kFactor <= (is_told_to_all(meeting, verb) ? meeting.limit() : meeting.limit_of_parts());
}

Meeting::Bytes ShortReduction::part_for(int peer) const {
  const auto* bytes = static_cast<const std::byte*>(in_.data);
  const std::size_t nbytes = out_.nbytes();
  if (signature().verb == Verb::reduce_scatter) return {bytes + static_cast<std::size_t>(peer) * nbytes, nbytes};
  if (signature().verb == Verb::reduce && signature().root != peer) return {};
  return {bytes, nbytes};
}

void ShortReduction::announce(std::uint64_t digest) {
  const auto* factor = reinterpret_cast<const std::byte*>(&reduction_.factor);
  const Meeting::Bytes prefix(factor, reduction_.op == ReduceOp::premul ? kFactor : 0);
  Meeting& meeting = engine().meeting();
  if (is_told_to_all(meeting, signature().verb)) {
    meeting.announce(sequence_, digest, part_for(signature().root), prefix);
    return;
  }
  std::vector<Meeting::Bytes> parts;
  for (int peer = 0; peer < engine().size(); ++peer) parts.push_back(part_for(peer));
  meeting.announce_parts(sequence_, digest, parts, prefix);
}

void ShortReduction::start_work() {
  const int rank = engine().rank();
  if ((signature().verb == Verb::reduce && signature().root != rank) || out_.count == 0) return;
  const ConstBuffer mine{part_for(rank).data(), out_.count, out_.dtype};
  reduce_all(engine().meeting(), sequence_, rank, engine().size(), mine, out_, reduction_);
}

void ShortReduction::reduce_all(const Meeting& meeting, std::uint64_t sequence, int rank, int n_ranks, ConstBuffer mine,
                                Buffer out, const Reduction& reduction) {
  constexpr std::size_t kFew = 8;
  std::array<kernels::Input, kFew> few;
  std::vector<kernels::Input> many;
  const auto size = static_cast<std::size_t>(n_ranks);
  if (size > kFew) many.resize(size);
  const std::span<kernels::Input> inputs(size > kFew ? many.data() : few.data(), size);
  const std::size_t skip = reduction.op == ReduceOp::premul ? kFactor : 0;
  for (std::size_t peer = 0; peer < size; ++peer) {
    kernels::Input& input = inputs[peer];
    if (static_cast<int>(peer) == rank) {
      input = {mine.data, reduction.factor};
      continue;
    }
    const std::byte* data = meeting.data(sequence, static_cast<int>(peer)).data();
    input.data = data + skip;
    if (skip != 0) std::memcpy(&input.factor, data, sizeof input.factor);
  }
  kernels::reduce(out.dtype, reduction.op, inputs, out.data, out.count);
}

}  // namespace samestep
