#include "hierarchy/neighbours.h"

#include "node/node_group.h"

namespace samestep {

Neighbours::Places Neighbours::places_of(const LevelGroup& group, ConstBuffer in, Buffer out) {
  if (group.host == nullptr) return {};
  const auto place = [&](const void* data, std::size_t nbytes) {
    return data == nullptr ? 0 : group.host->place_of(data, nbytes);
  };
  return {place(in.data, in.nbytes()), place(out.data, out.nbytes()), in.nbytes(), out.nbytes()};
}

const std::byte* Neighbours::read(int rank, std::size_t offset, std::size_t nbytes, std::byte* room) const {
  if (rank == group_->rank) return static_cast<const std::byte*>(in_.data) + offset;
  Host& host = *group_->host;
  if (const std::byte* here = host.at(on_host(rank), places(rank).in, places(rank).in_nbytes)) return here + offset;
  if (!host.pull(on_host(rank), room, places(rank).in + offset, nbytes)) throw Unreachable();
  return room;
}

std::byte* Neighbours::output(int rank, std::size_t offset) const {
  if (rank == group_->rank) return static_cast<std::byte*>(out_.data) + offset;
  std::byte* const here = group_->host->at(on_host(rank), places(rank).out, places(rank).out_nbytes);
  return here == nullptr ? nullptr : here + offset;
}

void Neighbours::write(int rank, std::size_t offset, const std::byte* from, std::size_t nbytes) const {
  if (!group_->host->push(on_host(rank), places(rank).out + offset, from, nbytes)) throw Unreachable();
}

}  // namespace samestep
