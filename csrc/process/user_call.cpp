#include "process/user_call.h"

#include <utility>

namespace samestep {
namespace {

// Per thread, because operations take their text from the thread that starts them.
thread_local std::string current;

}  // namespace

const std::string& user_call() { return current; }

UserCall::UserCall(std::string text, Inside inside) : before_(current) {
  if (current.empty() || inside == Inside::instead) {
    current = std::move(text);
  } else if (inside == Inside::part) {
    current += ", " + text;
  }
}

UserCall::~UserCall() { current = std::move(before_); }

}  // namespace samestep
