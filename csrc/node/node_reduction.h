#pragma once

#include <memory>
#include <vector>

#include "core/buffer.h"
#include "exchange/operation.h"
#include "exchange/window_plan.h"
#include "kernels/reduce.h"
#include "node/node_group.h"

namespace samestep {

/// allreduce, reduce and reduce_scatter of more than a line holds, over the memory of the ranks of one host. Every
/// element is reduced by one rank, in pairwise order of rank, and its bits are stored wherever they are wanted.
///
/// Ranks announce where their buffers are, and the elements too where those are few. What they all see then decides:
///   together: the elements lie behind the announcements; every rank reduces all of them for itself;
///   direct:   whoever is free takes a chunk, reads it from all buffers and stores the result into all, through
///             memory that all share or through the kernel;
///   staged:   slices go through shared memory in a pipeline of three stages.
class NodeReduction final : public Collective {
 public:
  NodeReduction(std::shared_ptr<Engine> engine, const Signature& signature, std::shared_ptr<NodeGroup> group,
                ConstBuffer in, Buffer out, const Reduction& reduction);

  /// What a rank announces: where its buffers are, and whether its elements lie behind.
  struct Posted {
    std::uint64_t in, out;  // places, see Host::place_of
    double factor;
    std::uint32_t with_elements;
    std::uint32_t oversubscribed;
  };

  /// Announces an allreduce, as the operation itself would do.
  static void announce_all_reduce(Engine& engine, const NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                                  ConstBuffer in, Buffer out, const Reduction& reduction);
  /// Everybody has announced it and agrees: reduces at once if all elements lie behind the announcements.
  static bool reduce_announced(Engine& engine, std::uint64_t sequence, ConstBuffer in, Buffer out, ReduceOp op);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  bool keeps_meeting() const override { return true; }
  std::vector<int> awaited() override;

 private:
  enum class Way : std::uint8_t { together, direct, staged };

  void gather();
  bool wanted_by(int rank) const;
  bool all_shared() const;
  void reduce_together();

  void begin_direct();
  bool work_direct();
  void reduce_chunk(std::size_t block, std::size_t first, std::size_t count);

  void begin_staged();
  bool work_staged();
  bool stage_is_free();
  void copy_in(std::size_t window);
  void reduce_own(std::size_t window);
  void copy_out(std::size_t window);
  std::byte* staged(int rank, std::size_t window, int owner);

  bool all_at(std::uint64_t step);
  void set_step(std::uint64_t step);

  std::shared_ptr<NodeGroup> group_;
  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
  std::size_t itemsize_;
  int size_;

  std::vector<Posted> posted_;
  std::vector<Meeting::Bytes> elements_;
  Way way_ = Way::together;

  std::size_t n_blocks_ = 1;  // direct: of reduce_scatter, one for each rank
  std::size_t block_count_ = 0;
  std::size_t chunk_count_ = 1;
  std::size_t chunks_per_block_ = 0;
  std::uint64_t n_chunks_ = 0;
  bool claims_ = false;  // chunks are claimed, not dealt out
  bool stuck_ = false;   // for good, see Unreachable
  bool out_of_chunks_ = false;
  std::size_t next_dealt_ = 0;

  WindowPlan plan_;  // staged
  std::size_t piece_bytes_ = 0;
  std::uint64_t step_ = 0;

  std::vector<std::byte> result_;  // together: what waits until others have read this rank's buffer
};

}  // namespace samestep
