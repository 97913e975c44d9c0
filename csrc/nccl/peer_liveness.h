#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// Whether the peers of a group live, for those who wait for them elsewhere, e.g. in NCCL, which may never notice.
/// Calls need a common lock.
class PeerLiveness {
 public:
  /// `group`: of the same ranks. `name`: of the group that errors are about.
  PeerLiveness(std::shared_ptr<Communicator> group, std::string name)
      : group_(std::move(group)), name_(std::move(name)) {}

  /// Posts a receive from each peer, to which nothing is ever sent: the group fails it when the peer is lost.
  void watch();
  /// The error of a lost peer, or null: PeerLostError, or StepError if it has left a block of together().
  std::exception_ptr lost();
  /// Takes the receives back.
  void end();

 private:
  std::shared_ptr<Communicator> group_;
  std::string name_;
  std::vector<Communicator::WorkPtr> receives_;
  std::byte unused_{};
};

}  // namespace samestep
