#pragma once

#include <cstdint>
#include <vector>

#include "communicator/signature.h"
#include "core/buffer.h"
#include "exchange/engine.h"
#include "kernels/reduce.h"
#include "node/moment.h"
#include "node/node_group.h"

namespace samestep {

/// What a rank announces of a reduction: where its buffers are, and whether its elements lie behind.
struct PostedBuffers {
  std::uint64_t in, out;  // places, see Host::place_of
  double factor;
  bool with_elements;
  bool first_is_staged;  // the first window lies in this rank's stage
  WayChoice::Way way;    // of rank 0 counts
  Moment begun;          // of what several ways are open to

  /// Of what came with a rank's header.
  static PostedBuffers in_front_of(Meeting::Bytes data);
  /// Announces an operation of this rank; `out` is null where it takes no result.
  static void announce(Engine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest, Verb verb,
                       ConstBuffer in, const Buffer* out, double factor, Moment begun = {},
                       bool first_is_staged = false);
};

/// A reduction among the ranks of a host, as all of them see it once they have met.
struct ReductionTask {
  Engine* engine;
  NodeGroup* group;
  std::uint64_t sequence;
  Verb verb;
  int root;
  ConstBuffer in;
  Buffer out;
  Reduction reduction;
  std::vector<PostedBuffers> posted;  // by rank

  int rank() const { return engine->rank(); }
  int size() const { return engine->size(); }
  std::size_t itemsize() const { return samestep::itemsize(in.dtype); }
  const PostedBuffers& posted_by(int rank) const { return posted[static_cast<std::size_t>(rank)]; }
  bool wanted_by(int rank) const { return verb != Verb::reduce || rank == root; }
  /// Do all buffers lie in memory that all share?
  bool all_shared() const;

  /// How far this rank is.
  void set_step(std::uint64_t step) const {
    group->arena->set_step(sequence, rank(), step);
    engine->moved();
  }
  /// Are all others that far?
  bool all_at(std::uint64_t step) const;
};

}  // namespace samestep
