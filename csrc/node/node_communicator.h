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

  WorkPtr now(const Call& call) override;
  WorkPtr send_now(const ConstBuffer& in, int dest, int tag) override;
  WorkPtr recv_now(const Buffer& out, int source, int tag, Status& status) override;
  WorkPtr sendrecv_now(const ConstBuffer& in, int dest, const Buffer& out, int source, Status& status,
                       WorkPtr& sending) override;
  std::shared_ptr<std::byte> allocate_shared(std::size_t nbytes) override;
  bool reaches_memory() const override { return group_->host->reaches_memory(); }
  std::uint64_t place_of(const void* data, std::size_t nbytes) const override {
    return group_->host->place_of(data, nbytes);
  }
  bool is_shared(const void* data, std::size_t nbytes) const override {
    return (place_of(data, nbytes) & Host::kShared) != 0;
  }
  bool pull(int peer, std::span<const Piece> pieces, bool taken) override;
  bool push(int peer, std::span<const Piece> pieces) override;
  std::shared_ptr<SharedHeap> heap() const override { return group_->host->heap(); }

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
  /// Null where it has ended already.
  WorkPtr begin_at_once(const Call& call);
  /// Copies each piece whose other end lies in shared memory; returns the others.
  template <class Copy>
  std::vector<Piece> copy_shared(int peer, std::span<const Piece> pieces, const Copy& copy);

  enum class Met : std::uint8_t { none, taken, other };
  /// Takes the next message from `source` if it is the one that is wanted and lies in the ring.
  Met take_message(Buffer out, int source, int tag, Status& status);

  std::shared_ptr<NodeGroup> group_;
};

}  // namespace samestep
