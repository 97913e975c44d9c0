#include "node/reduction_task.h"

#include <cstring>

namespace samestep {

PostedBuffers PostedBuffers::in_front_of(Meeting::Bytes data) {
  PostedBuffers posted;
  std::memcpy(&posted, data.data(), sizeof posted);
  return posted;
}

void PostedBuffers::announce(Engine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest, Verb verb,
                             ConstBuffer in, const Buffer* out, double factor, Moment begun, bool first_is_staged) {
  PostedBuffers posted{};
  posted.in = group.host->place_of(in.data, in.nbytes());
  posted.out = out != nullptr ? group.host->place_of(out->data, out->nbytes()) : Host::kShared;
  posted.factor = factor;
  posted.begun = begun;
  posted.first_is_staged = first_is_staged;
  const bool shared = (posted.in & posted.out & Host::kShared) != 0;
  const bool few = in.nbytes() <= Crossings::together_to(engine.size());
  posted.with_elements = few && !(shared && in.nbytes() >= Crossings::shared_from(engine.options().oversubscribed));
  if (!few && engine.rank() == 0 && engine.size() <= Crossings::kMostStaged)
    posted.way = group.ways[verb].next(in.nbytes());
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
