#pragma once

#include <functional>
#include <string_view>

#include "communicator/communicator.h"

/// How the others learn that a rank cannot begin a collective.
///
/// In its place the rank starts an operation that no other call is taken for. Ranks that make the call get a
/// MismatchError with the reason. If all ranks are refused, they agree, and the group continues.
namespace samestep::refusal {

CollectiveArgs args();

/// Calls `start` for an operation of `args`, in which the others read `why`, which may begin with the verb. Without a
/// thread for it, it goes on only while this rank waits: gives the others a moment to come. `start` returns null where
/// somebody else sees to it. Throws only what ends the wait, such as Ctrl-C.
void tell(std::string_view verb, std::string_view why, const std::function<Communicator::WorkPtr()>& start);

}  // namespace samestep::refusal
