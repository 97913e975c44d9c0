#include "exchange/inbox.h"

#include <algorithm>
#include <cstring>

#include "communicator/communicator.h"
#include "core/dtype.h"
#include "exchange/tags.h"

namespace samestep {

MessageHeader Inbox::header_of(Bytes message) {
  MessageHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  return header;
}

Inbox::Bytes Inbox::received() const {
  const MessageHeader header = header_of(room_);
  const std::size_t nbytes = header.body == kInlineBody ? header.count * itemsize(static_cast<DType>(header.dtype)) : 0;
  return Bytes(room_).first(sizeof header + nbytes);
}

void Inbox::hand_over(int source, Bytes message, Taker& taker) {
  taker.take(source, header_of(message), message.subspan(sizeof(MessageHeader)));
}

void Inbox::post() {
  if (request_.active || unmet_.empty()) return;
  room_.resize(messenger_.short_message());
  request_ = messenger_.receive(room_.data(), room_.size(), kAnySource, tags::kUserMessage);
}

void Inbox::expect(Taker& taker) {
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Message& message) {
    return taker.wants(message.source, header_of(message.bytes).tag);
  });
  if (found == kept_.end()) {
    unmet_.push_back(&taker);
    post();
    return;
  }
  const Message message = std::move(*found);
  kept_.erase(found);
  hand_over(message.source, message.bytes, taker);
}

bool Inbox::withdraw(Taker& taker) { return std::erase(unmet_, &taker) != 0; }

void Inbox::look() {
  while (!unmet_.empty()) {
    post();
    Messenger::Envelope from;
    if (!messenger_.test(request_, &from)) return;
    const Bytes message = received();
    const auto found = std::find_if(unmet_.begin(), unmet_.end(), [&](const Taker* taker) {
      return taker->wants(from.source, header_of(message).tag);
    });
    if (found == unmet_.end()) {
      kept_.push_back({from.source, {message.begin(), message.end()}});
      continue;
    }
    Taker& taker = **found;
    unmet_.erase(found);
    hand_over(from.source, message, taker);
  }
}

void Inbox::abandon() {
  if (request_.active) messenger_.cancel(request_);
}

}  // namespace samestep
