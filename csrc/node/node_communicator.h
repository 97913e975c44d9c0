#pragma once

#include <memory>
#include <vector>

#include "collectives/exchange_communicator.h"
#include "node/node_group.h"
#include "node/node_peer_memory.h"
#include "node/shm_exchange.h"
#include "shm/local_peers.h"

namespace samestep {

/// The ranks of one host. Headers are exchanged in shared memory (ShmHeaderExchange), collectives read and write the
/// users' arrays themselves or are staged in shared memory, and messages use ShmTransport.
class NodeCommunicator final : public ExchangeCommunicator {
 public:
  /// The group of `members`: ranks on the host, this rank among them, in the order of their new ranks. Collective over
  /// them. `number`: see GroupNumbers.
  static std::shared_ptr<NodeCommunicator> open(std::shared_ptr<LocalPeers> host, std::vector<int> members,
                                                ExchangeOptions options, const Deadline& deadline,
                                                std::uint64_t number = GroupNumbers::kWorld);
  /// A group of `ranks` of this one that shares nothing with it but the connections: neither ends with the other. Only
  /// those ranks call it, in any order of groups and from any thread, and also after this group has ended. Throws
  /// TimeoutError, which names the ranks that have not come; then all come to the next group of these ranks.
  std::shared_ptr<NodeCommunicator> open_beside(const std::vector<int>& ranks, const std::string& name,
                                                const Deadline& deadline);

  NodeCommunicator(std::shared_ptr<ProgressEngine> engine, std::shared_ptr<NodeGroup> group)
      : ExchangeCommunicator(std::move(engine)),
        group_(std::move(group)),
        memory_(group_->peers, group_->members, group_->fence) {}

  PeerMemory* peer_memory() override { return &memory_; }

 protected:
  WorkPtr start_collective(const CollectiveArgs& args) override;
  WorkPtr run_collective(const CollectiveArgs& args) override;
  WorkPtr run_send(const SendArgs& args) override;
  WorkPtr run_recv(const RecvArgs& args, Status& status) override;
  WorkPtr run_sendrecv(const SendArgs& sent, const RecvArgs& received, Status& status, WorkPtr& sending) override;
  WorkPtr start_reduction(const CollectiveArgs& args) override;
  WorkPtr start_exchange(const Signature& signature, std::vector<PeerTransfer> transfers) override {
    return start_operation<ShmExchange>(signature, std::move(transfers), group_);
  }
  WorkPtr start_long_bcast(const CollectiveArgs& args) override { return start_transfers(args); }
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                           const Deadline& deadline) override;

 private:
  static std::shared_ptr<NodeCommunicator> open_in(std::shared_ptr<std::byte> memory, std::shared_ptr<LocalPeers> host,
                                                   std::vector<int> members, ExchangeOptions options,
                                                   std::uint64_t number);
  /// Starts a collective and polls it for a short time. Null if it has completed.
  WorkPtr start_inline(const CollectiveArgs& args);
  enum class MatchResult : std::uint8_t { none, taken, other };
  /// Receives the next message from `source` if it matches and is eager.
  MatchResult try_receive(const RecvArgs& args, int source, Status& status);

  std::shared_ptr<NodeGroup> group_;
  NodePeerMemory memory_;
};

}  // namespace samestep
