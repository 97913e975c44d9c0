#include "node/reduction_task.h"

#include <cstring>

namespace samestep {

PostedBuffers PostedBuffers::in_front_of(Meeting::Bytes data) {
  PostedBuffers posted;
  std::memcpy(&posted, data.data(), sizeof posted);
  return posted;
}

void PostedBuffers::announce(Engine& engine, const NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                             ConstBuffer in, const Buffer* out, double factor) {
  const bool oversubscribed = engine.options().oversubscribed;
  PostedBuffers posted{group.host->place_of(in.data, in.nbytes()),
                       out != nullptr ? group.host->place_of(out->data, out->nbytes()) : Host::kShared, factor, 0,
                       oversubscribed};
  const bool shared = (posted.in & posted.out & Host::kShared) != 0;
  const bool few = in.nbytes() + sizeof posted <= engine.meeting().limit();
  posted.with_elements = few && !(shared && in.nbytes() >= Crossings::shared_from(oversubscribed));
  const Meeting::Bytes prefix(reinterpret_cast<const std::byte*>(&posted), sizeof posted);
  const Meeting::Bytes data(static_cast<const std::byte*>(in.data), posted.with_elements ? in.nbytes() : 0);
  engine.meeting().announce(sequence, digest, data, prefix);
}

bool ReductionTask::all_shared() const {
  for (int peer = 0; peer < size(); ++peer) {
    if ((posted_by(peer).in & Host::kShared) == 0) return false;
    if (wanted_by(peer) && (posted_by(peer).out & Host::kShared) == 0) return false;
  }
  return true;
}

bool ReductionTask::all_at(std::uint64_t step) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !group->arena->is_at(sequence, peer, step)) return false;
  }
  return true;
}

}  // namespace samestep
