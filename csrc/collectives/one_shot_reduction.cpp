#include "collectives/one_shot_reduction.h"

#include <array>
#include <cstring>

#include "kernels/reduce.h"

namespace samestep {
namespace {

constexpr std::size_t kFactor = sizeof(double);  // precedes the elements if ranks multiply

/// Whether all peers get the same data. That of a reduce does too if the header exchange has no data for single peers.
bool goes_to_all(const HeaderExchange& header_exchange, CollectiveType verb) {
  return verb == CollectiveType::allreduce ||
         (verb == CollectiveType::reduce && header_exchange.limits().per_peer == 0);
}

}  // namespace

bool OneShotReduction::fits(ProgressEngine& engine, CollectiveType verb, std::size_t nbytes) {
  const HeaderExchange& header_exchange = engine.header_exchange();
  const HeaderExchange::Limits& limits = header_exchange.limits();
  return nbytes + kFactor <= (goes_to_all(header_exchange, verb) ? limits.to_all : limits.per_peer);
}

HeaderExchange::Bytes OneShotReduction::part_for(int peer) const {
  const auto* bytes = static_cast<const std::byte*>(in_.data);
  const std::size_t nbytes = out_.nbytes();
  if (signature().type == CollectiveType::reduce_scatter)
    return {bytes + static_cast<std::size_t>(peer) * nbytes, nbytes};
  if (signature().type == CollectiveType::reduce && signature().root != peer) return {};
  return {bytes, nbytes};
}

void OneShotReduction::post(std::uint64_t digest) {
  // Ranks may pass different factors, so each sends its own.
  const auto* factor = reinterpret_cast<const std::byte*>(&reduction_.factor);
  const HeaderExchange::Bytes prefix(factor, multiplies(reduction_.op) ? kFactor : 0);
  if (goes_to_all(headers(), signature().type)) {
    headers().post(sequence_, digest, part_for(signature().root), prefix);
    return;
  }
  std::vector<HeaderExchange::Bytes> parts;
  for (int peer = 0; peer < size(); ++peer) parts.push_back(part_for(peer));
  headers().post_per_peer(sequence_, digest, parts, prefix);
}

void OneShotReduction::start_work() {
  // All of it here and not in `work`: the elements of peers are valid only until the headers are released.
  if ((signature().type == CollectiveType::reduce && signature().root != rank()) || out_.count == 0) return;
  const ConstBuffer mine{part_for(rank()).data(), out_.count, out_.dtype};
  reduce_all(headers(), sequence_, rank(), size(), mine, out_, reduction_);
}

void OneShotReduction::reduce_all(const HeaderExchange& header_exchange, std::uint64_t sequence, int rank, int n_ranks,
                                  ConstBuffer mine, Buffer out, const Reduction& reduction) {
  // This runs in the fast path of a host, so that small groups allocate nothing.
  constexpr std::size_t kMaxOnStack = 8;
  std::array<kernels::Input, kMaxOnStack> on_stack;
  std::vector<kernels::Input> on_heap;
  const auto size = static_cast<std::size_t>(n_ranks);
  if (size > kMaxOnStack) on_heap.resize(size);
  const std::span<kernels::Input> inputs(size > kMaxOnStack ? on_heap.data() : on_stack.data(), size);
  const std::size_t skip = multiplies(reduction.op) ? kFactor : 0;
  for (std::size_t peer = 0; peer < size; ++peer) {
    kernels::Input& input = inputs[peer];
    if (static_cast<int>(peer) == rank) {
      // In place, without a copy: this rank's header may contain elements for its peers only.
      input = {mine.data, reduction.factor};
      continue;
    }
    const std::byte* data = header_exchange.data(sequence, static_cast<int>(peer)).data();
    input.data = data + skip;
    if (skip != 0) std::memcpy(&input.factor, data, sizeof input.factor);
  }
  kernels::reduce(out.dtype, reduction.op, inputs, out.data, out.count, reduction.divisor_of(n_ranks));
}

}  // namespace samestep
