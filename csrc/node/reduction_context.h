#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "communicator/signature.h"
#include "core/buffer.h"
#include "engine/progress_engine.h"
#include "kernels/reduce.h"
#include "node/node_group.h"
#include "node/wrapping_timestamp.h"

namespace samestep {

/// What a rank posts for a reduction: the addresses of its buffers, and whether its elements follow.
struct ReductionDescriptor {
  std::uint64_t in, out;  // see LocalPeers::to_remote_address
  double factor;
  bool has_inline_elements;
  bool is_prestaged;             // the first segment is in this rank's stage
  bool hidden;                   // CMA must not be used: see LocalPeers::hides, or this has not been checked
  PathTuner::Path path;          // that of rank 0 is used
  WrappingTimestamp start_time;  // if several paths are possible

  /// Reads the descriptor from the data behind a header.
  static ReductionDescriptor parse(HeaderExchange::Bytes data);
  /// Posts an operation of this rank. `out` is null if it gets no result.
  static void post(ProgressEngine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                   CollectiveType verb, ConstBuffer in, const Buffer* out, double factor,
                   WrappingTimestamp start_time = {}, bool is_prestaged = false);
};

/// A reduction among the ranks of a host, with what all of them have posted.
struct ReductionContext {
  ProgressEngine* progress_engine;
  NodeGroup* group;
  std::uint64_t sequence;
  CollectiveType type;
  int root;
  ConstBuffer in;
  Buffer out;
  Reduction reduction;
  std::vector<ReductionDescriptor> descriptors;  // by rank

  int rank() const { return progress_engine->rank(); }
  int size() const { return progress_engine->size(); }
  std::size_t itemsize() const { return samestep::itemsize(in.dtype); }
  const ReductionDescriptor& descriptor_of(int rank) const { return descriptors[static_cast<std::size_t>(rank)]; }
  bool wanted_by(int rank) const { return type != CollectiveType::reduce || rank == root; }
  /// Whether all buffers are in shared memory.
  bool all_shared() const;
  /// `inputs` by rank.
  void reduce(std::span<const kernels::Input> inputs, std::span<void* const> outs, std::size_t count) const {
    kernels::reduce_into(in.dtype, reduction.op, inputs, outs, count, reduction.divisor_of(size()));
  }

  /// Publishes this rank's progress.
  void set_step(std::uint64_t step) const {
    group->region->set_step(sequence, rank(), step);
    progress_engine->note_progress();
  }
  /// Whether all other ranks have reached this step.
  bool all_at(std::uint64_t step) const;
};

}  // namespace samestep
