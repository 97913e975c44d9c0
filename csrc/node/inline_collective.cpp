#include "node/inline_collective.h"

#include <array>
#include <cstring>

#include "collectives/one_shot_reduction.h"
#include "collectives/pairwise_exchange.h"
#include "kernels/stream.h"
#include "node/reduction_context.h"

namespace samestep {
namespace {

// Tables by rank are on the stack, so that short calls allocate nothing.
constexpr std::size_t kMaxInlineRanks = 16;

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
HeaderExchange::Bytes all_of(const ConstBuffer& buffer) { return {bytes(buffer.data), buffer.nbytes()}; }

/// Bytes that go to each single rank, where each gets its own.
std::size_t block_nbytes(const ProgressEngine& engine, const CollectiveArgs& args) {
  return args.in.nbytes() / static_cast<std::size_t>(engine.size());
}

void copy(void* to, const void* from, std::size_t nbytes) {
  if (to != from && nbytes != 0) std::memmove(to, from, nbytes);
}

/// Whether this rank may store into what its peer posted, until it releases the operation; see kernels::own_lines.
bool may_own_read_lines(const ProgressEngine& engine, std::size_t nbytes) {
  constexpr std::size_t kMin = 256;  // fewer bytes may lie in the slot of the header itself
  // With more ranks others may still read the lines.
  return engine.size() == 2 && nbytes >= kMin && kernels::owns_after_read();
}

/// Copies what a peer posted.
void copy_posted(ProgressEngine& engine, std::uint64_t sequence, int peer, std::byte* to, std::size_t nbytes) {
  const std::byte* const data = engine.header_exchange().data(sequence, peer).data();
  if (!may_own_read_lines(engine, nbytes)) return copy(to, data, nbytes);
  kernels::copy_and_own_lines(to, const_cast<std::byte*>(data), nbytes);
}

/// The peer's data has been reduced: owns its lines but for the first `kept` bytes, which the peer may still read.
void own_read_lines(ProgressEngine& engine, std::uint64_t sequence, std::size_t kept) {
  const int peer = engine.rank() == 0 ? 1 : 0;
  const HeaderExchange::Bytes data = engine.header_exchange().data(sequence, peer);
  if (may_own_read_lines(engine, data.size())) {
    kernels::own_lines(const_cast<std::byte*>(data.data()) + kept, data.size() - kept);
  }
}

/// Posts block i of `in` for rank i.
void post_blocks(ProgressEngine& engine, std::uint64_t sequence, std::uint64_t digest, const CollectiveArgs& args) {
  const std::size_t nbytes = block_nbytes(engine, args);
  const auto size = static_cast<std::size_t>(engine.size());
  std::array<HeaderExchange::Bytes, kMaxInlineRanks> parts;
  for (std::size_t i = 0; i < size; ++i) parts[i] = {bytes(args.in.data) + i * nbytes, nbytes};
  engine.header_exchange().post_per_peer(sequence, digest, std::span(parts).first(size));
}

void reduce(ProgressEngine& engine, std::uint64_t sequence, const CollectiveArgs& args, ConstBuffer mine) {
  OneShotReduction::reduce_all(engine.header_exchange(), sequence, engine.rank(), engine.size(), mine, args.out,
                               args.reduction);
}

/// Reduces the elements behind the descriptors of all ranks. False if a rank has posted none.
bool reduce_described(ProgressEngine& engine, std::uint64_t sequence, const CollectiveArgs& args) {
  std::array<kernels::Input, kMaxInlineRanks> inputs;
  const auto size = static_cast<std::size_t>(engine.size());
  for (std::size_t peer = 0; peer < size; ++peer) {
    const HeaderExchange::Bytes data = engine.header_exchange().data(sequence, static_cast<int>(peer));
    const ReductionDescriptor posted = ReductionDescriptor::parse(data);
    if (!posted.has_inline_elements) return false;
    inputs[peer] = {static_cast<int>(peer) == engine.rank() ? args.in.data : data.data() + sizeof posted,
                    posted.factor};
  }
  kernels::reduce(args.in.dtype, args.reduction.op, std::span(inputs).first(size), args.out.data, args.in.count,
                  args.reduction.divisor_of(engine.size()));
  return true;
}

}  // namespace

bool InlineCollective::fits(ProgressEngine& engine, const CollectiveArgs& args) {
  if (static_cast<std::size_t>(engine.size()) > kMaxInlineRanks) return false;
  const std::size_t nbytes = args.in.nbytes();
  // Headers without a descriptor have no space for factors: such reductions take the general path, as do those of no
  // elements.
  const bool reducible = args.in.count != 0 && (!multiplies(args.reduction.op) || posts_descriptor(args));
  switch (args.type) {
    case CollectiveType::barrier:
      return true;
    case CollectiveType::allreduce:
      return reducible && nbytes <= Thresholds::one_shot_max(engine.size());
    case CollectiveType::reduce:
      return reducible && nbytes < Thresholds::kDescriptorMin && OneShotReduction::fits(engine, args.type, nbytes);
    case CollectiveType::reduce_scatter:
      return reducible && nbytes < Thresholds::kDescriptorMin &&
             OneShotReduction::fits(engine, args.type, block_nbytes(engine, args));
    case CollectiveType::bcast:
      return args.out.nbytes() <= PairwiseExchange::max_inline_bytes(engine, args.type);
    case CollectiveType::allgather:
      return nbytes <= PairwiseExchange::max_inline_bytes(engine, args.type);
    case CollectiveType::alltoall:
      return block_nbytes(engine, args) <= PairwiseExchange::max_inline_bytes(engine, args.type);
    default:
      return false;
  }
}

void InlineCollective::post(ProgressEngine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                            const CollectiveArgs& args) {
  HeaderExchange& header_exchange = engine.header_exchange();
  switch (args.type) {
    case CollectiveType::allreduce:
      if (!posts_descriptor(args)) return header_exchange.post(sequence, digest, all_of(args.in));
      return ReductionDescriptor::post(engine, group, sequence, digest, args.type, args.in, &args.out,
                                       args.reduction.factor);
    case CollectiveType::reduce:
      return header_exchange.post(sequence, digest,
                                  engine.rank() == args.root ? HeaderExchange::Bytes{} : all_of(args.in));
    case CollectiveType::bcast:
      return header_exchange.post(sequence, digest,
                                  engine.rank() == args.root ? all_of(args.out) : HeaderExchange::Bytes{});
    case CollectiveType::allgather:
      return header_exchange.post(sequence, digest, all_of(args.in));
    case CollectiveType::reduce_scatter:
    case CollectiveType::alltoall:
      return post_blocks(engine, sequence, digest, args);
    default:
      return header_exchange.post(sequence, digest, {});
  }
}

bool InlineCollective::finish(ProgressEngine& engine, std::uint64_t sequence, const CollectiveArgs& args) {
  const auto me = static_cast<std::size_t>(engine.rank());
  switch (args.type) {
    case CollectiveType::allreduce:
      if (posts_descriptor(args)) {
        if (!reduce_described(engine, sequence, args)) return false;
        constexpr std::size_t kLine = 64;  // with the ReductionDescriptor
        own_read_lines(engine, sequence, kLine);
        break;
      }
      reduce(engine, sequence, args, args.in);
      // The peer's elements have been read, and this rank is their only reader, so it may own their lines.
      own_read_lines(engine, sequence, 0);
      break;
    case CollectiveType::reduce:
      if (engine.rank() == args.root) reduce(engine, sequence, args, args.in);
      break;
    case CollectiveType::reduce_scatter: {
      const std::size_t nbytes = block_nbytes(engine, args);
      reduce(engine, sequence, args, {bytes(args.in.data) + me * nbytes, args.out.count, args.in.dtype});
      break;
    }
    case CollectiveType::bcast:
      if (engine.rank() != args.root) {
        copy_posted(engine, sequence, args.root, bytes(args.out.data), args.out.nbytes());
      }
      break;
    case CollectiveType::allgather:
    case CollectiveType::alltoall: {
      const bool gathers = args.type == CollectiveType::allgather;
      const std::size_t nbytes = gathers ? args.in.nbytes() : block_nbytes(engine, args);
      copy(bytes(args.out.data) + me * nbytes, bytes(args.in.data) + (gathers ? 0 : me * nbytes), nbytes);
      for (int peer = 0; peer < engine.size(); ++peer) {
        if (peer == engine.rank()) continue;
        copy_posted(engine, sequence, peer, bytes(args.out.data) + static_cast<std::size_t>(peer) * nbytes, nbytes);
      }
      break;
    }
    default:
      break;
  }
  return true;
}

}  // namespace samestep
