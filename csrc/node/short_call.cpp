#include "node/short_call.h"

#include <array>
#include <cstring>

#include "exchange/movement.h"
#include "exchange/short_reduction.h"
#include "kernels/stream.h"
#include "node/node_reduction.h"

namespace samestep::short_call {
namespace {

constexpr std::size_t kFewRanks = 16;

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
Meeting::Bytes all_of(const ConstBuffer& buffer) { return {bytes(buffer.data), buffer.nbytes()}; }

/// Bytes that go to each single rank, where each gets its own.
std::size_t block_nbytes(const Engine& engine, const Call& call) {
  return call.in.nbytes() / static_cast<std::size_t>(engine.size());
}

void copy(void* to, const void* from, std::size_t nbytes) {
  if (to != from && nbytes != 0) std::memmove(to, from, nbytes);
}

/// May this rank store into what a peer announced, until it releases the operation? See kernels::take_lines.
bool may_give_back(const Engine& engine, std::size_t nbytes) {
  constexpr std::size_t kFrom = 256;  // less may lie in the line itself
  return engine.size() == 2 && nbytes >= kFrom && kernels::gives_back();
}

/// Copies what a peer announced.
void take(Engine& engine, std::uint64_t sequence, int peer, std::byte* to, std::size_t nbytes) {
  const std::byte* const data = engine.meeting().data(sequence, peer).data();
  if (!may_give_back(engine, nbytes)) return copy(to, data, nbytes);
  kernels::take_lines(to, const_cast<std::byte*>(data), nbytes);
}

/// What a peer announced has been reduced. Its owner may still read the first `kept` bytes.
void give_back(Engine& engine, std::uint64_t sequence, std::size_t kept) {
  const int peer = engine.rank() == 0 ? 1 : 0;
  const Meeting::Bytes data = engine.meeting().data(sequence, peer);
  if (may_give_back(engine, data.size())) {
    kernels::give_back_lines(const_cast<std::byte*>(data.data()) + kept, data.size() - kept);
  }
}

/// Block i of `in` for rank i.
void announce_blocks(Engine& engine, std::uint64_t sequence, std::uint64_t digest, const Call& call) {
  const std::size_t nbytes = block_nbytes(engine, call);
  const auto size = static_cast<std::size_t>(engine.size());
  if (size == 2) {  // one peer: no table is needed
    return engine.meeting().announce(
        sequence, digest, {bytes(call.in.data) + static_cast<std::size_t>(1 - engine.rank()) * nbytes, nbytes});
  }
  std::array<Meeting::Bytes, kFewRanks> parts;
  for (std::size_t i = 0; i < size; ++i) parts[i] = {bytes(call.in.data) + i * nbytes, nbytes};
  engine.meeting().announce_parts(sequence, digest, std::span(parts).first(size));
}

void reduce(Engine& engine, std::uint64_t sequence, const Call& call, ConstBuffer mine) {
  ShortReduction::reduce_all(engine.meeting(), sequence, engine.rank(), engine.size(), mine, call.out, call.reduction);
}

}  // namespace

bool fits(Engine& engine, const Call& call) {
  if (static_cast<std::size_t>(engine.size()) > kFewRanks) return false;
  const std::size_t nbytes = call.in.nbytes();
  const bool reducible = call.reduction.op != ReduceOp::premul && call.in.count != 0;
  switch (call.verb) {
    case Verb::barrier:
      return true;
    case Verb::all_reduce:
      return reducible && nbytes <= Crossings::together_to(engine.size());
    case Verb::reduce:
      return reducible && nbytes < Crossings::kPostedFrom && ShortReduction::fits(engine, call.verb, nbytes);
    case Verb::reduce_scatter:
      return reducible && nbytes < Crossings::kPostedFrom &&
             ShortReduction::fits(engine, call.verb, block_nbytes(engine, call));
    case Verb::broadcast:
      return call.out.nbytes() <= Movement::short_nbytes(engine, call.verb);
    case Verb::all_gather:
      return nbytes <= Movement::short_nbytes(engine, call.verb);
    case Verb::all_to_all:
      return block_nbytes(engine, call) <= Movement::short_nbytes(engine, call.verb);
    default:
      return false;
  }
}

void announce(Engine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest, const Call& call) {
  Meeting& meeting = engine.meeting();
  switch (call.verb) {
    case Verb::all_reduce:
      if (call.in.nbytes() < Crossings::kPostedFrom) return meeting.announce(sequence, digest, all_of(call.in));
      return PostedBuffers::announce(engine, group, sequence, digest, call.verb, call.in, &call.out,
                                     call.reduction.factor);
    case Verb::reduce:
      return meeting.announce(sequence, digest, engine.rank() == call.root ? Meeting::Bytes{} : all_of(call.in));
    case Verb::broadcast:
      return meeting.announce(sequence, digest, engine.rank() == call.root ? all_of(call.out) : Meeting::Bytes{});
    case Verb::all_gather:
      return meeting.announce(sequence, digest, all_of(call.in));
    case Verb::reduce_scatter:
    case Verb::all_to_all:
      return announce_blocks(engine, sequence, digest, call);
    default:
      return meeting.announce(sequence, digest, {});
  }
}

bool finish(Engine& engine, std::uint64_t sequence, const Call& call) {
  const auto me = static_cast<std::size_t>(engine.rank());
  switch (call.verb) {
    case Verb::all_reduce:
      if (call.in.nbytes() >= Crossings::kPostedFrom) {
        if (!NodeReduction::reduce_announced(engine, sequence, call.in, call.out, call.reduction.op)) return false;
        constexpr std::size_t kLine = 64;  // with the PostedBuffers
        give_back(engine, sequence, kLine);
        break;
      }
      reduce(engine, sequence, call, call.in);
      give_back(engine, sequence, 0);
      break;
    case Verb::reduce:
      if (engine.rank() == call.root) reduce(engine, sequence, call, call.in);
      break;
    case Verb::reduce_scatter: {
      const std::size_t nbytes = block_nbytes(engine, call);
      reduce(engine, sequence, call, {bytes(call.in.data) + me * nbytes, call.out.count, call.in.dtype});
      break;
    }
    case Verb::broadcast:
      if (engine.rank() != call.root) {
        take(engine, sequence, call.root, bytes(call.out.data), call.out.nbytes());
      }
      break;
    case Verb::all_gather:
    case Verb::all_to_all: {
      const bool gathers = call.verb == Verb::all_gather;
      const std::size_t nbytes = gathers ? call.in.nbytes() : block_nbytes(engine, call);
      copy(bytes(call.out.data) + me * nbytes, bytes(call.in.data) + (gathers ? 0 : me * nbytes), nbytes);
      for (int peer = 0; peer < engine.size(); ++peer) {
        if (peer == engine.rank()) continue;
        take(engine, sequence, peer, bytes(call.out.data) + static_cast<std::size_t>(peer) * nbytes, nbytes);
      }
      break;
    }
    default:
      break;
  }
  return true;
}

}  // namespace samestep::short_call
