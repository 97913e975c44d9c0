#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "node/reduction_task.h"

namespace samestep {

/// Whoever is free takes a chunk, reads it from all buffers and stores the result into all that want it, through memory
/// that all share or through the kernel.
class DirectReduction {
 public:
  explicit DirectReduction(const ReductionTask& task);

  /// Some chunks; true once all are reduced, by whomever.
  bool work();

 private:
  std::uint64_t reduce_some();
  bool all_dealt_done(std::uint64_t done);
  bool all_counted(std::uint64_t done);
  std::uint64_t next_chunk();
  void reduce(std::uint64_t chunk);
  std::span<const kernels::Input> inputs(std::size_t offset, std::size_t nbytes);
  bool wants(int rank, std::size_t block) const;

  const ReductionTask& task_;
  std::size_t n_blocks_ = 1;  // of reduce_scatter, one for each rank
  std::size_t block_count_ = 0;
  std::size_t chunk_count_ = 1;
  std::size_t chunks_per_block_ = 0;
  std::uint64_t n_chunks_ = 0;
  bool claims_ = false;  // chunks are claimed, not dealt out
  bool stuck_ = false;   // for good, see Unreachable
  bool out_of_chunks_ = false;
  bool told_ = false;  // the others that all that was dealt to this rank is done
  std::size_t next_dealt_ = 0;
};

}  // namespace samestep
