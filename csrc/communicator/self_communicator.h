#pragma once

#include <memory>
#include <string>

#include "communicator/communicator.h"

namespace samestep {

/// A group of one rank: every verb is a local copy or reduction, finished when it returns. Messages to
/// oneself wait in a queue until they are received.
std::shared_ptr<Communicator> make_self_communicator(const std::string& name);

}  // namespace samestep
