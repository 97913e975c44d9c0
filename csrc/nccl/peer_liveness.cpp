#include "nccl/peer_liveness.h"

#include "core/error.h"
#include "core/format.h"

namespace samestep {

PeerLiveness::PeerLiveness(std::shared_ptr<Communicator> group, std::string name)
    : group_(std::move(group)), name_(std::move(name)) {
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer != group_->rank()) receives_.push_back(group_->recv({&unused_, 1, DType::uint8}, peer, 0));
  }
}

std::exception_ptr PeerLiveness::lost() const {
  // Every wait in a group checks its peers now and then, but nobody may be waiting in this one.
  group_->membership().check_peers();
  for (const Communicator::WorkPtr& receive : receives_) {
    if (!receive->done() || !receive->error()) continue;
    // The text begins with the receive that failed, of which the user knows nothing.
    const std::string text = text_of(receive->error()), about_receive = "): ";
    const std::size_t cut = text.find(about_receive);
    const std::string who = cut == std::string::npos ? text : text.substr(cut + about_receive.size());
    const std::string of_devices = str("device operations of group '", name_, "': ", who);
    // A rank that has left because of an exception in a block of together() has not been lost: the class tells the end
    // of the block that this error is a consequence.
    if (is_a<StepError>(receive->error())) return std::make_exception_ptr(StepError(of_devices));
    return std::make_exception_ptr(PeerLostError(of_devices));
  }
  return nullptr;
}

void PeerLiveness::end() const {
  for (const Communicator::WorkPtr& receive : receives_) receive->cancel();
}

}  // namespace samestep
