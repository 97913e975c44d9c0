#pragma once

#include <cstdint>

#include "communicator/call.h"
#include "exchange/engine.h"
#include "node/node_group.h"

namespace samestep::short_call {

// A collective of few bytes that is done at once, outside the queue of operations: all ranks announce it with its
// elements behind, and each takes what it needs. On the wire it is what the operation itself would be, so one rank may
// do the one and another the other.

/// Is this one of them?
bool fits(Engine& engine, const Call& call);

void announce(Engine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest, const Call& call);

/// Everybody has announced it and agrees. False if it takes more than what lies behind the announcements.
bool finish(Engine& engine, std::uint64_t sequence, const Call& call);

}  // namespace samestep::short_call
