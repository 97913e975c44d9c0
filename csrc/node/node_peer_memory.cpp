#include "node/node_peer_memory.h"

#include "kernels/stream.h"
#include "shm/shared_heap.h"

namespace samestep {

std::shared_ptr<std::byte> NodePeerMemory::allocate(std::size_t nbytes) { return allocate_shared(heap(), nbytes); }

bool NodePeerMemory::read_peer(int peer, std::span<const RemoteSegment> segments, bool taken) {
  const auto take = [taken](const RemoteSegment& segment, std::byte* there) {
    // A peer's CPU has written these lines, which string instructions read at half the speed on some processors.
    taken ? kernels::copy_and_own_lines(segment.local, there, segment.nbytes)
          : kernels::copy_vectorized(segment.local, there, segment.nbytes);
  };
  return peers_->read_peer(member(peer), copy_shared(peer, segments, take));
}

bool NodePeerMemory::write_peer(int peer, std::span<const RemoteSegment> segments) {
  const auto give = [](const RemoteSegment& segment, std::byte* there) {
    kernels::copy(there, segment.local, segment.nbytes);
  };
  const std::vector<RemoteSegment> others = copy_shared(peer, segments, give);
  return others.empty() || fence_->write(static_cast<std::size_t>(peer), others);
}

template <class Copy>
std::vector<RemoteSegment> NodePeerMemory::copy_shared(int peer, std::span<const RemoteSegment> segments,
                                                       const Copy& copy) {
  // What is mapped is copied here. All others share one system call.
  std::vector<RemoteSegment> others;
  for (const RemoteSegment& segment : segments) {
    std::byte* const there = peers_->map_peer_memory(member(peer), segment.remote, segment.nbytes);
    there == nullptr ? others.push_back(segment) : copy(segment, there);
  }
  return others;
}

}  // namespace samestep
