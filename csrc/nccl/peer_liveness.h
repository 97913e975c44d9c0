#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// Whether the peers of a group live, for code that waits for them elsewhere, e.g. in NCCL, which may never notice.
class PeerLiveness {
 public:
  /// Posts a receive from each peer, to which nothing is ever sent: the group fails it when the peer is lost.
  /// `group`: of the same ranks. `name`: of the group that errors are about.
  PeerLiveness(std::shared_ptr<Communicator> group, std::string name);

  /// The error of a lost peer, or null: PeerLostError, or StepError if it has left a block of together().
  std::exception_ptr lost() const;
  /// Cancels the receives.
  void end() const;

 private:
  std::shared_ptr<Communicator> group_;
  std::string name_;
  std::vector<Communicator::WorkPtr> receives_;
  std::byte unused_{};
};

}  // namespace samestep
