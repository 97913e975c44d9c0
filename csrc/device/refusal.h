#pragma once

#include <string>
#include <string_view>

#include "communicator/communicator.h"

/// How the others learn that a rank cannot begin a collective.
///
/// In its place the rank starts an operation that no other call is taken for. Ranks that make the call get a
/// MismatchError with the reason. If all ranks are refused, they agree, and the group continues.
namespace samestep::refusal {

CollectiveArgs args();

/// What the others read. `why` may begin with the verb.
std::string text(std::string_view verb, std::string_view why);

/// Without a thread for it, `work` goes on only while this rank waits: gives the others a moment to come. Throws only
/// what ends the wait, such as Ctrl-C.
void wait_for_others(Work& work);

/// All of it, in a group of host memory. Throws only what ends the wait.
void tell(Communicator& group, std::string_view verb, std::string_view why);

}  // namespace samestep::refusal
