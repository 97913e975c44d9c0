#include "collectives/peer_transfer.h"

namespace samestep {
namespace {

using Counts = std::span<const std::uint64_t>;

/// Calls `visit(i, offset, nbytes)` for consecutive blocks of `counts[i]` elements, or of `nbytes` if `counts` is
/// empty.
template <class Visit>
void for_each_block(std::size_t n_blocks, Counts counts, std::size_t item, std::size_t nbytes, const Visit& visit) {
  std::size_t offset = 0;
  for (std::size_t i = 0; i < n_blocks; ++i) {
    if (!counts.empty()) nbytes = counts[i] * item;
    visit(i, offset, nbytes);
    offset += nbytes;
  }
}

void send_blocks(std::span<PeerTransfer> transfers, const ConstBuffer& in, Counts counts, std::size_t nbytes) {
  const auto* const bytes = static_cast<const std::byte*>(in.data);
  for_each_block(transfers.size(), counts, itemsize(in.dtype), nbytes,
                 [&](std::size_t i, std::size_t at, std::size_t n) {
                   transfers[i].out = bytes + at;
                   transfers[i].out_nbytes = n;
                 });
}

void receive_blocks(std::span<PeerTransfer> transfers, const Buffer& out, Counts counts, std::size_t nbytes) {
  auto* const bytes = static_cast<std::byte*>(out.data);
  for_each_block(transfers.size(), counts, itemsize(out.dtype), nbytes,
                 [&](std::size_t i, std::size_t at, std::size_t n) {
                   transfers[i].in = bytes + at;
                   transfers[i].in_nbytes = n;
                 });
}

void send(PeerTransfer& to, const ConstBuffer& in) {
  to.out = static_cast<const std::byte*>(in.data);
  to.out_nbytes = in.nbytes();
}

void receive(PeerTransfer& from, const Buffer& out) {
  from.in = static_cast<std::byte*>(out.data);
  from.in_nbytes = out.nbytes();
}

}  // namespace

void plan_transfers(const CollectiveArgs& args, int rank, std::span<PeerTransfer> transfers) {
  const bool at_root = rank == args.root;
  const auto root = static_cast<std::size_t>(args.root);
  switch (args.type) {
    case CollectiveType::bcast:
      // Root sends to itself as well; the transfer has the same address at both ends and is no copy.
      for (PeerTransfer& transfer : transfers) {
        if (at_root) send(transfer, args.out);
      }
      return receive(transfers[root], args.out);
    case CollectiveType::allgather:
    case CollectiveType::allgatherv:
      for (PeerTransfer& transfer : transfers) send(transfer, args.in);
      return receive_blocks(transfers, args.out, args.counts, args.in.nbytes());
    case CollectiveType::gather:
    case CollectiveType::gatherv:
      send(transfers[root], args.in);
      if (at_root) receive_blocks(transfers, args.out, args.counts, args.in.nbytes());
      return;
    case CollectiveType::scatter:
    case CollectiveType::scatterv:
      if (at_root) send_blocks(transfers, args.in, args.counts, args.out.nbytes());
      return receive(transfers[root], args.out);
    case CollectiveType::alltoall:
    case CollectiveType::alltoallv: {
      // Unused by alltoallv, whose counts give the length of each block.
      const std::size_t block = args.in.nbytes() / transfers.size();
      send_blocks(transfers, args.in, args.counts, block);
      return receive_blocks(transfers, args.out, args.recv_counts, block);
    }
    default:
      return;
  }
}

}  // namespace samestep
