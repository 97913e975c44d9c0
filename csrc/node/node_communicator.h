#pragma once

#include <memory>
#include <vector>

#include "exchange/exchange_communicator.h"
#include "node/host.h"
#include "node/node_group.h"
#include "node/node_movement.h"

namespace samestep {

/// The ranks of one host, over memory that they share. Ranks meet in lines of shared memory, reductions run over the
/// buffers themselves, and everything else goes through mailboxes.
class NodeCommunicator final : public ExchangeCommunicator {
 public:
  /// The group of `members` (ranks on the host, in the order of their new ranks), this rank among them. Collective over
  /// them.
  static std::shared_ptr<NodeCommunicator> open(std::shared_ptr<Host> host, std::vector<int> members,
                                                ExchangeOptions options, const Deadline& deadline);

  NodeCommunicator(std::shared_ptr<Engine> engine, std::shared_ptr<NodeGroup> group)
      : ExchangeCommunicator(std::move(engine)), group_(std::move(group)) {}

  WorkPtr all_reduce_now(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) override;
  std::shared_ptr<std::byte> allocate_shared(std::size_t nbytes) override;
  /// Where `allocate_shared` gets its memory from. Null where there is none.
  std::shared_ptr<SharedHeap> heap() const { return group_->host->heap(); }

 protected:
  WorkPtr reduction(const Signature& signature, ConstBuffer in, Buffer out, const Reduction& reduction,
                    std::size_t nbytes) override;
  WorkPtr movement(const Signature& signature, std::vector<Movement::Route> routes) override {
    return start<NodeMovement>(signature, std::move(routes), group_);
  }
  WorkPtr long_broadcast(const Signature& signature, Buffer buffer) override;
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                           const Deadline& deadline) override;

 private:
  std::shared_ptr<NodeGroup> group_;
};

}  // namespace samestep
