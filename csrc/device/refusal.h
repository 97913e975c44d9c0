#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "communicator/communicator.h"

/// How the others learn that a rank cannot begin a collective.
///
/// In its place the rank starts an operation that no other call is taken for. Ranks that make the call get a
/// MismatchError with the reason. If all ranks are refused, they agree, and the group continues.
namespace samestep::refusal {

CollectiveArgs args();

/// What the others read. `why` may begin with the verb.
std::string text(std::string_view verb, std::string_view why);

/// Calls `start` for operations of `args`, in which the others read `text`. Without a thread for them, they go on only
/// while this rank waits: gives the others a moment to come. `start` leaves out what somebody else sees to. Throws only
/// what ends the wait, such as Ctrl-C.
void tell(const std::string& text, const std::function<void(std::vector<Communicator::WorkPtr>&)>& start);

}  // namespace samestep::refusal
