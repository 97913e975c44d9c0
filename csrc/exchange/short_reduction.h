#pragma once

#include "core/buffer.h"
#include "exchange/operation.h"

namespace samestep {

/// allreduce, reduce and reduce_scatter of data that travels with the headers: every rank that needs
/// the result gets all ranks' elements and reduces them itself.
class ShortReduction : public Collective {
 public:
  /// `in`: for reduce_scatter size() blocks of out.count elements, else as many elements as `out`.
  /// `out` is not written where the verb says so.
  ShortReduction(std::shared_ptr<Engine> engine, const Signature& signature, ConstBuffer in, Buffer out,
                 const Reduction& reduction)
      : Collective(std::move(engine), signature), in_(in), out_(out), reduction_(reduction) {}

  /// Bytes that this verb sends with a header: does it fit?
  static bool fits(Engine& engine, Verb verb, std::size_t nbytes);

  /// Reduces this rank's elements and those that came with the headers of all others.
  static void reduce_all(const Meeting& meeting, std::uint64_t sequence, int rank, int n_ranks, ConstBuffer mine,
                         Buffer out, const Reduction& reduction);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override { return true; }

 private:
  /// This rank's elements for `peer`.
  Meeting::Bytes part_for(int peer) const;

  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
};

}  // namespace samestep
