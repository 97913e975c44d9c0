#pragma once

#include "communicator/signature.h"
#include "core/buffer.h"
#include "core/reduce_op.h"

namespace samestep {

/// A collective with all that it needs, as the methods of Communicator explain it: all_reduce, reduce, broadcast (from
/// and to `out`), all_gather, reduce_scatter, all_to_all or barrier.
struct Call {
  Verb verb;
  ConstBuffer in = {};
  Buffer out = {};
  Reduction reduction = {};
  int root = -1;
  Shape shape = {};

  Signature signature() const;
  std::uint64_t digest() const;  ///< of the signature
};

namespace checks {

/// That the arguments fit each other, on this rank. Throws InvalidArgumentError.
void arguments(const Call& call, int rank, int size);

}  // namespace checks

}  // namespace samestep
