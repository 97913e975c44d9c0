#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engine/operation.h"
#include "hierarchy/hierarchical_group.h"
#include "hierarchy/hierarchical_plan.h"

namespace samestep {

/// A long allreduce, reduce, reduce_scatter, bcast or allgather over several hosts; ranks of a host access each other's
/// memory. For each chunk (see HierarchicalPlan), one rank of every host is the leader:
///   1. it reduces the elements of its host's ranks, reading them in place,
///   2. it sends the partial result to the leader of the chunk's root host,
///   3. which combines the partial results of all hosts, stores the result into the buffers of the ranks of its host,
///      and sends it to the leaders of the other hosts, which store it there.
/// A few chunks of each rank are in flight at the same time, so that reducing, sending and storing overlap. Within a
/// host ranks wait for each other only at the beginning and at the end.
///
/// All ranks get the same bits: pairwise sums over hosts of the pairwise sums over each host's ranks. For an allreduce
/// each of h hosts sends 2 (h - 1) / h of the buffer, regardless of its number of ranks.
///
/// Source of the lanes: Traeff, arXiv 1910.13373.
class HierarchicalCollective : public Collective {
 public:
  /// For a bcast both `in` and `out` are the buffer.
  HierarchicalCollective(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args,
                         std::shared_ptr<HierarchicalGroup> group);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> pending_peers() override;
  void abort() override;

  HierarchicalCollective(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args,
                         std::shared_ptr<HierarchicalGroup> group, HierarchicalPlan plan);

  /// Makes progress on this rank's chunks. True once all are stored. Throws PeerMemoryLost.
  virtual bool work_on_chunks();
  virtual void take_scratch();
  /// Ranks of other hosts for whose messages it waits.
  virtual std::vector<int> pending_chunk_peers();

  std::size_t bytes_of(const HierarchicalChunk& chunk) const { return chunk.count * itemsize_; }
  /// A chunk's elements of this host's ranks, by rank: in place, or copies that are valid until the next call.
  std::vector<const std::byte*> local_inputs(const HierarchicalChunk& chunk);
  /// Reduces the elements of this host's ranks. Returns the result: `into`, or the elements of a single rank in place.
  const std::byte* reduce_locally(std::size_t first, std::size_t count, std::span<const std::byte* const> inputs,
                                  std::byte* into) const;
  /// Stores a result into the buffers of the other ranks of this host: all of them, or those not in shared memory.
  void write_to_local_ranks(const HierarchicalChunk& chunk, const std::byte* from, bool to_shared_too) const;

  std::shared_ptr<HierarchicalGroup> group_;
  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
  std::size_t itemsize_;
  HierarchicalPlan plan_;
  std::vector<std::size_t> mine_;  // chunks of which this rank is a leader
  std::size_t next_ = 0;

 private:
  struct Posted {
    double factor;
    std::uint64_t in, out;  // see LocalPeers::to_remote_address; 0 if there is none
    std::uint64_t in_nbytes, out_nbytes;
  };
  /// A chunk in flight.
  struct Open {
    std::size_t number = 0;
    HierarchicalChunk chunk;
    std::byte* room = nullptr;                 // one block for each host
    std::vector<RequestSet> contributions_in;  // by host
    RequestSet sent;                           // a partial result or the result
    RequestSet result;
    bool result_posted = false;
    bool done = false;  // the result is stored into all buffers
  };

  bool finishes_here(const Open& open) const { return open.chunk.root_host == group_->own_host(); }
  bool is_local_output(const HierarchicalChunk& chunk) const { return wants(chunk, group_->rank); }
  bool wants(const HierarchicalChunk& chunk, int rank) const;
  std::byte* block(const Open& open, int host) const { return open.room + static_cast<std::size_t>(host) * block_; }

  /// Copies elements into shared memory if the other ranks of this host cannot access this rank's array.
  void stage_if_not_shared();
  const Posted& posted_by(int rank) const { return of_ranks_[static_cast<std::size_t>(rank)]; }
  /// `nbytes` of the input of a rank of this host from `offset` on: in place, or a copy in `room`.
  const std::byte* read_input(int rank, std::size_t offset, std::size_t nbytes, std::byte* room) const;
  /// The output of another rank of this host; null if it is not in shared memory.
  std::byte* shared_output(int rank, std::size_t offset) const;
  void open_next();
  bool finish(Open& open);
  void combine(Open& open, std::span<void* const> outs);
  void post_results();
  bool store(Open& open);
  bool notify_local_ranks();

  std::vector<Posted> of_ranks_;  // by rank of the group, for those of this host
  std::size_t max_open_;
  std::size_t block_;  // bytes of buffer for one host's part of a chunk
  Scratch::Block scratch_;
  std::deque<Open> open_;
  bool posted_ = false;
  bool peer_memory_lost_ = false;
  bool notified_ = false;
  RequestSet done_out_;
  std::vector<RequestSet> done_in_;    // by local rank
  std::vector<std::byte> done_bytes_;  // by local rank; the values are not used
  std::shared_ptr<std::byte> staged_in_, staged_out_;
  void* user_out_ = nullptr;
};

}  // namespace samestep
