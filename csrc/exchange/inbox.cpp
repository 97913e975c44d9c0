#include "exchange/inbox.h"

#include <algorithm>
#include <cstring>

#include "communicator/communicator.h"
#include "exchange/tags.h"

namespace samestep {

MessageHeader Inbox::header_of(const Message& message) {
  MessageHeader header;
  std::memcpy(&header, message.bytes.data(), sizeof header);
  return header;
}

void Inbox::hand_over(const Message& message, Taker& taker) {
  taker.take(message.source, header_of(message), std::span(message.bytes).subspan(sizeof(MessageHeader)));
}

void Inbox::post() {
  if (request_.active || unmet_.empty()) return;
  room_.resize(sizeof(MessageHeader) + kInlineMessage);
  request_ = messenger_.receive(room_.data(), room_.size(), kAnySource, tags::kUserMessage);
}

void Inbox::expect(Taker& taker) {
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Message& message) {
    return taker.wants(message.source, header_of(message).tag);
  });
  if (found == kept_.end()) {
    unmet_.push_back(&taker);
    post();
    return;
  }
  const Message message = std::move(*found);
  kept_.erase(found);
  hand_over(message, taker);
}

bool Inbox::withdraw(Taker& taker) { return std::erase(unmet_, &taker) != 0; }

void Inbox::look() {
  while (!unmet_.empty()) {
    post();
    Messenger::Envelope from;
    if (!messenger_.test(request_, &from)) return;
    Message message{from.source, std::move(room_)};
    const auto found = std::find_if(unmet_.begin(), unmet_.end(), [&](const Taker* taker) {
      return taker->wants(message.source, header_of(message).tag);
    });
    if (found == unmet_.end()) {
      kept_.push_back(std::move(message));
      continue;
    }
    Taker& taker = **found;
    unmet_.erase(found);
    hand_over(message, taker);
  }
}

void Inbox::abandon() {
  if (request_.active) messenger_.cancel(request_);
}

}  // namespace samestep
