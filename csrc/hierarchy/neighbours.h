#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "hierarchy/level_group.h"

namespace samestep {

/// The buffers that the ranks of this host, this rank among them, have given for one operation.
class Neighbours {
 public:
  struct Places {
    std::uint64_t in = 0, out = 0;  ///< see Host::place_of
    std::uint64_t in_nbytes = 0, out_nbytes = 0;
  };

  explicit Neighbours(std::shared_ptr<LevelGroup> group) : group_(std::move(group)) {}

  /// Where this rank's buffers are, in the words of its host.
  static Places places_of(const LevelGroup& group, ConstBuffer in, Buffer out);

  /// `places`: by rank of the group; those of other hosts are ignored.
  void meet(ConstBuffer in, Buffer out, std::vector<Places> places) {
    in_ = in, out_ = out, places_ = std::move(places);
  }

  /// `nbytes` of a rank's input from `offset` on: where they lie, or, where memory is not shared, a copy in `room`.
  /// Throws Unreachable if the rank's memory cannot be read.
  const std::byte* read(int rank, std::size_t offset, std::size_t nbytes, std::byte* room) const;

  /// Where a rank's output can be stored to; null if it has to be written by `write`.
  std::byte* output(int rank, std::size_t offset) const;
  void write(int rank, std::size_t offset, const std::byte* from, std::size_t nbytes) const;

 private:
  const Places& places(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  int on_host(int rank) const { return group_->seats.seat(rank).on_host; }

  std::shared_ptr<LevelGroup> group_;
  ConstBuffer in_;
  Buffer out_;
  std::vector<Places> places_;
};

}  // namespace samestep
