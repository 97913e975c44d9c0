#include "node/reduction_context.h"

#include <array>
#include <cstring>
#include <span>
#include <vector>

namespace samestep {

ReductionDescriptor ReductionDescriptor::parse(HeaderExchange::Bytes data) {
  ReductionDescriptor posted;
  std::memcpy(&posted, data.data(), sizeof posted);
  return posted;
}

void ReductionDescriptor::post(ProgressEngine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                               CollectiveType verb, ConstBuffer in, const Buffer* out, double factor,
                               WrappingTimestamp start_time, bool is_prestaged) {
  ReductionDescriptor posted{};
  posted.in = group.peers->to_remote_address(in.data, in.nbytes());
  // A rank that gets no result must not keep the others from working in shared memory.
  posted.out =
      out != nullptr ? group.peers->to_remote_address(out->data, out->nbytes()) : LocalPeers::kSharedAddressBit;
  posted.factor = factor;
  posted.start_time = start_time;
  posted.is_prestaged = is_prestaged;
  const bool shared = (posted.in & posted.out & LocalPeers::kSharedAddressBit) != 0;
  const bool few = in.nbytes() <= Thresholds::one_shot_max(engine.size());
  // Few elements travel with the header, unless peers can read them in place at less cost.
  posted.has_inline_elements =
      few && !(shared && in.nbytes() >= Thresholds::in_place_min(engine.options().oversubscribed));
  bool needs_no_cma = false;
  if (!few && engine.size() <= Thresholds::kMaxStagedRanks) {
    PathTuner& tuner = group.path_tuners[verb];
    if (engine.rank() == 0) {
      posted.path = tuner.choose(in.nbytes());
    }
    const bool is_expected = engine.rank() != 0 || PathTuner::uses_stages(posted.path);
    needs_no_cma = is_expected && tuner.needs_no_cma(in.nbytes());
  }
  // Only where CMA may be used, because the check takes system calls.
  const std::array<std::span<const std::byte>, 2> buffers{
      std::span(static_cast<const std::byte*>(in.data), in.nbytes()),
      out == nullptr || out->data == in.data ? std::span<const std::byte>()
                                             : std::span(static_cast<const std::byte*>(out->data), out->nbytes())};
  posted.hidden = !few && !shared && (needs_no_cma || group.peers->hides(buffers));
  const HeaderExchange::Bytes prefix(reinterpret_cast<const std::byte*>(&posted), sizeof posted);
  const HeaderExchange::Bytes data(static_cast<const std::byte*>(in.data),
                                   posted.has_inline_elements ? in.nbytes() : 0);
  engine.header_exchange().post(sequence, digest, data, prefix);
}

bool ReductionContext::all_shared() const {
  for (int peer = 0; peer < size(); ++peer) {
    if ((descriptor_of(peer).in & LocalPeers::kSharedAddressBit) == 0) return false;
    if (wanted_by(peer) && (descriptor_of(peer).out & LocalPeers::kSharedAddressBit) == 0) return false;
  }
  return true;
}

bool ReductionContext::all_at(std::uint64_t step) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !group->region->is_at(sequence, peer, step)) return false;
  }
  return true;
}

}  // namespace samestep
