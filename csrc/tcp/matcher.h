#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "communicator/tag_matcher.h"
#include "tcp/frame.h"
#include "transport/transport.h"

namespace samestep::tcp {

/// A pending send or receive.
struct RequestState {
  bool ended = false;
  int peer = -1, tag = -1;
  const std::byte* from = nullptr;
  std::byte* into = nullptr;
  std::size_t nbytes = 0;        ///< of the message sent; capacity of a receive, then the length of the matched message
  std::size_t moved = 0;         ///< of a message in data frames
  std::size_t too_long = 0;      ///< bytes of a message that did not fit
  Transport::Envelope envelope;  ///< of the matched message; source -1 before
};

/// A message or RTS that no receive had matched when it arrived.
struct UnexpectedMessage {
  int source, tag;
  std::size_t nbytes;
  std::unique_ptr<std::byte[]> bytes;
  std::uint32_t id = 0;
  bool offered = false;  ///< only the RTS has arrived
  bool complete = false;
  RequestState* taker = nullptr;  ///< the receive that has matched it before it was complete
};

/// The receives and messages of one group on one rank. Sources are ranks of the world.
class Matcher : public TagMatcher<RequestState*, UnexpectedMessage> {
 public:
  RequestState* new_request();
  void recycle(RequestState* record) { free_.push_back(record); }

  /// The first message that matches the receive, or null.
  UnexpectedMessage* find_unexpected(const RequestState& receive);
  /// The first complete message with this tag, or null.
  const UnexpectedMessage* find_complete(int tag);
  /// Drops incomplete messages from a source that is lost.
  void forget_incomplete(int source);
  /// Drops all posted receives and unexpected messages; their RequestStates stay valid.
  void forget_all() { static_cast<TagMatcher&>(*this) = {}; }
  /// The receive is cancelled: the message that it has matched is discarded.
  void orphan(const RequestState* receive);

 private:
  std::deque<RequestState> requests_;
  std::vector<RequestState*> free_;
  RequestState discarded_;  // receives messages to discard
};

}  // namespace samestep::tcp
