#include "engine/message_inbox.h"

#include <cstring>

#include "transport/tags.h"

namespace samestep {

MessageHeader MessageInbox::header_of(Bytes message) {
  MessageHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  return header;
}

MessageInbox::Bytes MessageInbox::received() const {
  const MessageHeader header = header_of(room_);
  return Bytes(room_).first(sizeof header + (header.body == kInlineBody ? header.nbytes() : 0));
}

void MessageInbox::deliver(int source, std::uint64_t arrival, Bytes message, PostedReceive& receive) {
  receive.arrival_ = arrival;
  receive.take(source, header_of(message), message.subspan(sizeof(MessageHeader)));
}

void MessageInbox::post() {
  // Only while the user has a receive posted. At other times messages stay in the transport, where the fast path of a
  // host (NodeCommunicator::run_recv) receives them without this class.
  if (!request_.active && matcher_.has_posted()) receive_next();
}

void MessageInbox::receive_next() {
  // Longer elements are in a message of their own, whose tag only the matched receive uses (see Send::begin).
  room_.resize(transport_.eager_limit());
  request_ = transport_.receive(room_.data(), room_.size(), kAnySource, tags::kUserMessage);
}

MessageInbox::Message* MessageInbox::find(int source, int tag) {
  return matcher_.find(source, tag, [](const Message& message) { return message.taker == nullptr; });
}

void MessageInbox::post_receive(PostedReceive& receive, int source, int tag) {
  Message* const found = find(source, tag);
  if (found == nullptr) {
    matcher_.post(source, tag, &receive);
    post();
    return;
  }
  if (found->giver != nullptr) {
    found->taker = &receive;
    return;
  }
  const Message message = std::move(*found);
  matcher_.drop(found);
  deliver(message.source, message.arrival, message.bytes, receive);
}

bool MessageInbox::withdraw(PostedReceive& receive) {
  bool waited = matcher_.withdraw(&receive);
  matcher_.for_each_unexpected([&](Message& message) {
    if (message.taker != &receive) return;
    message.taker = nullptr;
    waited = true;
  });
  matcher_.drop_if([&](const Message& message) { return message.giver == &receive; });  // its elements never come
  return waited;
}

void MessageInbox::give_back(const PostedReceive& giver, int source, MessageHeader header) {
  header.body = kInlineBody;
  Message message{source, header.tag, giver.arrival_, std::vector<std::byte>(sizeof header), &giver};
  std::memcpy(message.bytes.data(), &header, sizeof header);
  message.taker = matcher_.match(source, header.tag);
  matcher_.keep_before(std::move(message), [&](const Message& kept) { return kept.arrival > giver.arrival_; });
}

void MessageInbox::complete(const PostedReceive& giver, Bytes elements) {
  Message* const found =
      matcher_.find(kAnySource, kAnyTag, [&](const Message& message) { return message.giver == &giver; });
  if (found == nullptr) return;
  found->bytes.insert(found->bytes.end(), elements.begin(), elements.end());
  found->giver = nullptr;
  if (found->taker == nullptr) return;
  const Message message = std::move(*found);
  matcher_.drop(found);
  deliver(message.source, message.arrival, message.bytes, *message.taker);
}

bool MessageInbox::take_next() {
  Transport::Envelope from;
  if (!request_.active || !transport_.test(request_, &from)) return false;
  const Bytes message = received();
  const int tag = header_of(message).tag;
  const std::uint64_t arrival = arrivals_++;
  // The transport delivers the messages of a sender in order, and they are matched one by one, so they cannot overtake
  // each other, as MPI requires (MPI 5.0, section 3.5).
  if (PostedReceive* const receive = matcher_.match(from.source, tag); receive != nullptr) {
    deliver(from.source, arrival, message, *receive);
  } else {
    matcher_.keep({from.source, tag, arrival, {message.begin(), message.end()}});
  }
  return true;
}

void MessageInbox::poll() {
  while (matcher_.has_posted()) {
    post();
    if (!take_next()) return;
  }
}

bool MessageInbox::probe(int source, int tag, Status& status) {
  poll();  // receives that were posted before come first
  Transport::Envelope from;
  for (;;) {
    // A message that is asked for may be behind others, because the transport knows only one tag for all messages of
    // the user: so all that have arrived are received. Not more than that: a receive that stays posted would close the
    // fast path.
    if (!request_.active && transport_.probe(tags::kUserMessage, from)) receive_next();
    if (!take_next()) break;
  }
  const Message* const message = find(source, tag);
  if (message == nullptr) return false;
  status = {message->source, message->tag, header_of(message->bytes).count};
  return true;
}

void MessageInbox::abandon() {
  if (request_.active) transport_.cancel(request_);
}

}  // namespace samestep
