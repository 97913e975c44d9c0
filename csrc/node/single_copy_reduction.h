#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "node/reduction_context.h"

namespace samestep {

/// Two-shot reduction without staging: a rank reads a chunk from the buffers of all ranks, reduces it, and stores the
/// result into all buffers that receive it, through shared memory or by CMA. Ranks claim chunks as they become free.
class SingleCopyReduction {
 public:
  explicit SingleCopyReduction(const ReductionContext& task);

  /// Reduces some chunks. True once all ranks' chunks are reduced.
  bool work();

 private:
  std::uint64_t reduce_some();
  bool are_static_chunks_done(std::uint64_t done);
  bool is_count_complete(std::uint64_t done);
  std::uint64_t next_chunk();
  void reduce(std::uint64_t chunk);
  std::span<const kernels::Input> inputs(std::size_t offset, std::size_t nbytes);
  bool wants(int rank, std::size_t block) const;

  const ReductionContext& context_;
  std::size_t n_blocks_ = 1;  // of a reduce_scatter: one for each rank
  std::size_t block_count_ = 0;
  std::size_t chunk_count_ = 1;
  std::size_t chunks_per_block_ = 0;
  std::uint64_t n_chunks_ = 0;
  bool is_dynamic_ = false;        // ranks take the next chunk when they are free; else each rank has its own
  bool peer_memory_lost_ = false;  // see PeerMemoryLost
  bool out_of_chunks_ = false;
  bool notified_ = false;  // this rank has published that its assigned chunks are reduced
  std::size_t next_static_ = 0;
};

}  // namespace samestep
