#include "nccl/nccl_address.h"

#include <array>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "waiting/await.h"

namespace samestep {

struct NcclAddress::Invitation {
  nccl_abi::UniqueId id;
  std::array<char, 384> failed{};  // why there is no id; empty if there is one
};

NcclAddress::NcclAddress(const NcclLibrary& nccl, Communicator& group) : invitation_(std::make_unique<Invitation>()) {
  // Rank 0 sends one in any case. Without the text the others would wait for an address until their deadline.
  if (group.rank() == 0) {
    try {
      wait_hooks().run_without_gil([&] { invitation_->id = nccl.unique_id(); });
    } catch (const Error& error) {
      std::strncpy(invitation_->failed.data(), error.what(), invitation_->failed.size() - 1);
    }
  }
  const Buffer sent{invitation_.get(), sizeof *invitation_, DType::uint8};
  exchange_ = group.start({.type = CollectiveType::bcast, .out = sent, .root = 0, .shape = Shape::flat(sent.count)});
}

NcclAddress::~NcclAddress() {
  if (!exchange_->done()) static_cast<void>(invitation_.release());  // the group may still write to it
}

nccl_abi::UniqueId NcclAddress::wait(const Until& until, const std::function<void()>& look) const {
  bool late = false;
  await([&] { return exchange_->done() || late; },
        [&](Seconds) {
          look();
          late = until().passed();
        });
  exchange_->wait(until());  // throws its error, or names the missing ranks
  if (invitation_->failed[0] != '\0') throw Error(str("NCCL does not start on rank 0: ", invitation_->failed.data()));
  return invitation_->id;
}

}  // namespace samestep
