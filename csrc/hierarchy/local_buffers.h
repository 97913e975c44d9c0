#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "hierarchy/hierarchical_group.h"

namespace samestep {

/// The buffers of the ranks of this host in one operation, those of this rank among them.
class LocalBuffers {
 public:
  struct Addresses {
    std::uint64_t in = 0, out = 0;  ///< see LocalPeers::to_remote_address
    std::uint64_t in_nbytes = 0, out_nbytes = 0;
  };

  explicit LocalBuffers(std::shared_ptr<HierarchicalGroup> group) : group_(std::move(group)) {}

  /// The addresses of this rank's buffers for the other ranks of its host.
  static Addresses addresses_of(const HierarchicalGroup& group, ConstBuffer in, Buffer out);

  /// `addresses`: by rank of the group; those of other hosts are ignored.
  void set(ConstBuffer in, Buffer out, std::vector<Addresses> addresses) {
    in_ = in, out_ = out, addresses_ = std::move(addresses);
  }

  /// `nbytes` of a rank's input from `offset` on: in place if it is shared memory, else a copy in `room`. Throws
  /// PeerMemoryLost if the rank's memory cannot be read.
  const std::byte* read(int rank, std::size_t offset, std::size_t nbytes, std::byte* room) const;

  /// A rank's output, if it is shared memory; null if it must be written by `write`.
  std::byte* output(int rank, std::size_t offset) const;
  void write(int rank, std::size_t offset, const std::byte* from, std::size_t nbytes) const;

 private:
  const Addresses& addresses(int rank) const { return addresses_[static_cast<std::size_t>(rank)]; }
  int local_rank(int rank) const { return group_->topology.location(rank).local_rank; }

  std::shared_ptr<HierarchicalGroup> group_;
  ConstBuffer in_;
  Buffer out_;
  std::vector<Addresses> addresses_;
};

}  // namespace samestep
