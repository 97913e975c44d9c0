#include "hierarchy/local_buffers.h"

#include "node/node_group.h"

namespace samestep {

LocalBuffers::Addresses LocalBuffers::addresses_of(const HierarchicalGroup& group, ConstBuffer in, Buffer out) {
  if (group.peers == nullptr) return {};
  const auto address_of = [&](const void* data, std::size_t nbytes) {
    // A rank that gives or gets nothing has no such buffer.
    return data == nullptr ? 0 : group.peers->to_remote_address(data, nbytes);
  };
  return {address_of(in.data, in.nbytes()), address_of(out.data, out.nbytes()), in.nbytes(), out.nbytes()};
}

const std::byte* LocalBuffers::read(int rank, std::size_t offset, std::size_t nbytes, std::byte* room) const {
  if (rank == group_->rank) return static_cast<const std::byte*>(in_.data) + offset;
  LocalPeers& host = *group_->peers;
  if (const std::byte* here = host.map_peer_memory(local_rank(rank), addresses(rank).in, addresses(rank).in_nbytes))
    return here + offset;
  // The operation waits until the engine knows which rank has left, see PeerMemoryLost.
  if (!host.read_peer(local_rank(rank), room, addresses(rank).in + offset, nbytes)) throw PeerMemoryLost();
  return room;
}

std::byte* LocalBuffers::output(int rank, std::size_t offset) const {
  if (rank == group_->rank) return static_cast<std::byte*>(out_.data) + offset;
  std::byte* const here =
      group_->peers->map_peer_memory(local_rank(rank), addresses(rank).out, addresses(rank).out_nbytes);
  return here == nullptr ? nullptr : here + offset;
}

void LocalBuffers::write(int rank, std::size_t offset, const std::byte* from, std::size_t nbytes) const {
  const auto index = static_cast<std::size_t>(group_->topology.local_index(rank));
  if (!group_->fence->write(index, addresses(rank).out + offset, from, nbytes)) throw PeerMemoryLost();
}

}  // namespace samestep
