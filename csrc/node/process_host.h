#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "node/host.h"

namespace samestep {

/// All-gather of bytes over the ranks of a host, by whatever brought them together. All that is needed to start.
using Exchange = std::function<std::vector<std::string>(const std::string&)>;

/// The host of ranks that are processes. Collective: returns once all ranks know each other. Throws TimeoutError at
/// the deadline, UnavailableError where the kernel does not let processes share memory.
std::shared_ptr<Host> meet_processes(int rank, int size, const Exchange& exchange, const Deadline& deadline);

}  // namespace samestep
