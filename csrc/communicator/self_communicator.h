#pragma once

#include <memory>
#include <string>

#include "communicator/communicator.h"

namespace samestep {

/// A group of one rank. Every collective is a local copy or reduction that is complete when the call returns. Messages
/// to itself wait in a queue until they are received.
std::shared_ptr<Communicator> make_self_communicator(const std::string& name);

}  // namespace samestep
