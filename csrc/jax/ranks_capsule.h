#pragma once

#include <memory>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// What the extension `_core` gives to the library that jaxlib loads, in a capsule of Python: the ranks, and those
/// functions of theirs that are neither virtual nor inline, for the library links nothing of `_core`.
struct RanksCapsule {
  static constexpr const char* kName = "samestep.ranks";

  std::vector<std::shared_ptr<Communicator>> ranks;
  Communicator::WorkPtr (Communicator::*run)(const CollectiveArgs& args);
  Communicator::WorkPtr (Communicator::*send)(const SendArgs& args);
  Communicator::WorkPtr (Communicator::*recv)(const RecvArgs& args);
};

}  // namespace samestep
