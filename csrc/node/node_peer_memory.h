#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "communicator/peer_memory.h"
#include "shm/local_peers.h"
#include "shm/write_fence.h"

namespace samestep {

/// Access to the memory of the other ranks of a group on one host.
class NodePeerMemory final : public PeerMemory {
 public:
  /// `members`: by rank of the group, the rank on the host. Empty if the group has ranks of other hosts: then only the
  /// shared heap is available, and there is no fence.
  NodePeerMemory(std::shared_ptr<LocalPeers> peers, std::vector<int> members, std::shared_ptr<WriteFence> fence)
      : peers_(std::move(peers)), members_(std::move(members)), fence_(std::move(fence)) {}

  std::shared_ptr<SharedHeap> heap() const override { return peers_->heap(); }
  std::shared_ptr<std::byte> allocate(std::size_t nbytes) override;
  bool has_cma() const override { return !members_.empty() && peers_->has_cma(); }
  std::uint64_t to_remote_address(const void* data, std::size_t nbytes) const override {
    return peers_->to_remote_address(data, nbytes);
  }
  bool is_shared(const void* data, std::size_t nbytes) const override {
    return (to_remote_address(data, nbytes) & LocalPeers::kSharedAddressBit) != 0;
  }
  bool read_peer(int peer, std::span<const RemoteSegment> segments, bool taken) override;
  bool write_peer(int peer, std::span<const RemoteSegment> segments) override;
  void withdraw(const void* data, std::size_t nbytes) override { fence_->withdraw(data, nbytes); }

 private:
  int member(int peer) const { return members_[static_cast<std::size_t>(peer)]; }
  /// Copies each segment whose other end is in shared memory; returns the others.
  template <class Copy>
  std::vector<RemoteSegment> copy_shared(int peer, std::span<const RemoteSegment> segments, const Copy& copy);

  std::shared_ptr<LocalPeers> peers_;
  std::vector<int> members_;
  std::shared_ptr<WriteFence> fence_;
};

}  // namespace samestep
