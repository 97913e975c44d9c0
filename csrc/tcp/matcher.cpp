#include "tcp/matcher.h"

namespace samestep::tcp {

RequestState* Matcher::new_request() {
  if (free_.empty()) return &requests_.emplace_back();
  RequestState* const record = free_.back();
  free_.pop_back();
  *record = RequestState{};
  return record;
}

UnexpectedMessage* Matcher::find_unexpected(const RequestState& receive) {
  // A message that a receive has matched stays here until all of it has arrived.
  return find(receive.peer, receive.tag, [](const UnexpectedMessage& a) { return a.taker == nullptr; });
}

const UnexpectedMessage* Matcher::find_complete(int tag) {
  // Complete ones only: a rank that has probed successfully receives the message at once, and polls until it has it. An
  // RTS would make it wait for the sender.
  return find(kAnySource, tag,
              [](const UnexpectedMessage& a) { return a.complete && !a.offered && a.taker == nullptr; });
}

void Matcher::forget_incomplete(int source) {
  drop_if([source](const UnexpectedMessage& a) { return a.source == source && (!a.complete || a.offered); });
}

void Matcher::orphan(const RequestState* receive) {
  for_each_unexpected([&](UnexpectedMessage& arrived) {
    if (arrived.taker == receive) arrived.taker = &discarded_;
  });
}

}  // namespace samestep::tcp
