#pragma once

#include "core/buffer.h"
#include "engine/operation.h"

namespace samestep {

/// One-shot allreduce, reduce and reduce_scatter of inline data: every rank that needs the result receives the elements
/// of all ranks behind their headers, and reduces them itself.
class OneShotReduction : public Collective {
 public:
  /// `args.out.count` is that of the result also on ranks that get none.
  OneShotReduction(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args)
      : Collective(std::move(engine), args.signature()), in_(args.in), out_(args.out), reduction_(args.reduction) {}

  /// Whether `nbytes`, which each rank sends to a peer, fit behind a header.
  static bool fits(ProgressEngine& engine, CollectiveType verb, std::size_t nbytes);

  /// Reduces `mine` and the elements behind the headers of all peers.
  static void reduce_all(const HeaderExchange& header_exchange, std::uint64_t sequence, int rank, int n_ranks,
                         ConstBuffer mine, Buffer out, const Reduction& reduction);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override { return true; }

 private:
  /// The elements that this rank sends to `peer`.
  HeaderExchange::Bytes part_for(int peer) const;

  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
};

}  // namespace samestep
