#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "exchange/operation.h"
#include "hierarchy/level_group.h"
#include "hierarchy/level_plan.h"
#include "hierarchy/neighbours.h"

namespace samestep {

/// A long allreduce, reduce, reduce_scatter, bcast or allgather over several hosts, whose ranks reach each other's
/// memory. Of each chunk (see LevelPlan) the handler of every host
///   1. reduces the elements of its host's ranks, reading them where they lie,
///   2. sends the partial result to the handler of the host that finishes the chunk,
///   3. there combines the hosts' results, stores the bits into the buffers of all ranks of its host and sends them to
///      the handlers of the other hosts, who do the same.
/// A few chunks of each rank are under way at the same time, so that reducing, sending and storing overlap. Nobody
/// waits for others within a host but at the beginning and at the end.
///
/// All ranks get the same bits: those of the sums over hosts of the sums over their ranks, each in pairwise order.
/// Between hosts 2 (h - 1) / h of the buffer go out of each of h hosts for allreduce, whatever the number of ranks.
///
/// Source of the scheme of lanes: Traeff, arXiv 1910.13373.
class LevelWork : public Collective {
 public:
  /// `in`, `out` as the verb has them; for broadcast both are the buffer. `out` is ignored where it is not written.
  LevelWork(std::shared_ptr<Engine> engine, const Signature& signature, std::shared_ptr<LevelGroup> group,
            ConstBuffer in, Buffer out, const Reduction& reduction);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> awaited() override;
  void give_up() override;

  LevelWork(std::shared_ptr<Engine> engine, const Signature& signature, std::shared_ptr<LevelGroup> group,
            ConstBuffer in, Buffer out, const Reduction& reduction, LevelPlan plan);

  /// As far as it goes with this rank's chunks; true once all are stored. Throws Unreachable.
  virtual bool work_on_chunks();
  virtual void take_scratch();
  /// Ranks of other hosts that are awaited.
  virtual std::vector<int> late_with_chunks();

  std::size_t bytes_of(const LevelChunk& chunk) const { return chunk.count * itemsize_; }
  /// A chunk's elements on this host, by rank: where they lie, or copies that are good until the next call.
  std::vector<const std::byte*> inputs_here(const LevelChunk& chunk);
  /// The elements of this host's ranks: the address of their sum, `into` or where a single rank's lie.
  const std::byte* reduce_here(std::size_t first, std::size_t count, std::span<const std::byte* const> inputs,
                               std::byte* into) const;
  /// Stores finished bytes to the ranks of this host whose memory is not shared, or to all but this one.
  void write_to_neighbours(const LevelChunk& chunk, const std::byte* from, bool to_shared_too) const;

  std::shared_ptr<LevelGroup> group_;
  Marks marks_;
  Neighbours neighbours_;
  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
  std::size_t itemsize_;
  LevelPlan plan_;
  std::vector<std::size_t> mine_;  // chunks that this rank handles
  std::size_t next_ = 0;

 private:
  struct Posted {
    double factor;
    Neighbours::Places places;
  };
  /// A chunk that this rank handles, under way.
  struct Open {
    std::size_t number = 0;
    LevelChunk chunk;
    std::byte* room = nullptr;               // a block for each host
    std::vector<Requests> contributions_in;  // by host
    Requests sent;                           // a partial result or the finished one
    Requests result;
    bool result_posted = false;
    bool done = false;  // finished, and stored wherever this rank has to store it
  };

  bool is_mine(const Open& open) const { return open.chunk.finisher == group_->my_host(); }
  bool i_want(const LevelChunk& chunk) const { return wants(chunk, group_->rank); }
  bool wants(const LevelChunk& chunk, int rank) const;
  std::byte* block(const Open& open, int host) const { return open.room + static_cast<std::size_t>(host) * block_; }

  /// Where other ranks of this host can reach no private memory: copies to shared memory.
  void stage_if_hidden();
  void open_next();
  bool finish(Open& open);
  void combine(Open& open, std::span<void* const> outs);
  void post_results();
  bool store(Open& open);
  bool tell_neighbours();

  std::vector<double> factors_;
  std::size_t most_open_;
  std::size_t block_;  // bytes of room for one host's part of a chunk
  Scratch::Block scratch_;
  std::deque<Open> open_;
  bool announced_ = false;
  bool stuck_ = false;
  bool told_ = false;
  Requests ends_out_;
  std::vector<Requests> ends_in_;  // by place on this host
  std::vector<std::byte> ends_;    // by rank; what they hold is of no interest
  std::shared_ptr<std::byte> staged_in_, staged_out_;
  void* wanted_at_ = nullptr;
};

}  // namespace samestep
