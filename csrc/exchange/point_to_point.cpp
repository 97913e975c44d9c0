#include "exchange/point_to_point.h"

#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

std::string peer_text(int peer) { return peer == kAnySource ? "any rank" : str("rank ", peer); }
std::string tag_text(int tag) { return tag == kAnyTag ? "any tag" : str("tag ", tag); }

}  // namespace

void Send::begin(std::uint64_t) {
  const bool is_short = engine().messenger().is_short(in_.data, sizeof(MessageHeader) + in_.nbytes());
  const MessageHeader header{in_.count, static_cast<std::uint32_t>(in_.dtype),
                             is_short ? kInlineBody : engine().next_body(), tag_};
  head_.resize(sizeof header + (is_short ? in_.nbytes() : 0));
  std::memcpy(head_.data(), &header, sizeof header);
  if (is_short) kernels::copy(head_.data() + sizeof header, in_.data, in_.nbytes());
  head_request_ = engine().messenger().send(head_.data(), head_.size(), dest_, tags::kUserMessage);
  if (!is_short) {
    const Messenger::WaitedFor waited_for(engine().messenger(), waited_for_);
    body_.send(engine().messenger(), in_.data, in_.nbytes(), dest_, tags::of_body(header.body));
  }
  engine().count_message(in_.nbytes());
}

bool Send::advance() { return engine().messenger().test(head_request_) && body_.test(engine().messenger()); }

std::string Send::describe() const {
  return str("send of ", in_.count, " ", name(in_.dtype), " to rank ", dest_, " with ", tag_text(tag_), " (group '",
             engine().name(), "')");
}

void Receive::begin(std::uint64_t) { engine().inbox().expect(*this); }

bool Receive::wants(int source, int tag) const {
  return (source_ == kAnySource || source_ == source) && (tag_ == kAnyTag || tag_ == tag);
}

void Receive::take(int source, const MessageHeader& sent, std::span<const std::byte> elements) {
  has_head_ = true;
  sent_ = sent;
  status_ = {source, sent.tag, sent.count};
  const auto dtype = static_cast<DType>(sent.dtype);
  fits_ = sent.count == out_.count && dtype == out_.dtype;
  if (sent.body == kInlineBody) {
    if (fits_) kernels::copy(out_.data, elements.data(), out_.nbytes());
    return;
  }
  const std::size_t nbytes = sent.count * itemsize(dtype);
  if (!fits_) unwanted_.resize(nbytes);
  const Messenger::WaitedFor waited_for(engine().messenger(), waited_for_);
  body_.receive(engine().messenger(), fits_ ? out_.data : unwanted_.data(), nbytes, source, tags::of_body(sent.body));
}

bool Receive::advance() {
  if (!has_head_ || !body_.test(engine().messenger())) return false;
  if (!fits_) throw_mismatch();
  return true;
}

void Receive::throw_mismatch() const {
  throw MismatchError(str(describe(), ": rank ", status_.source, " sent ", sent_.count, " ",
                          name(static_cast<DType>(sent_.dtype)), " with tag ", sent_.tag,
                          "; the message has been taken and thrown away"));
}

bool Receive::needs(int peer, std::uint64_t) {
  return peer == (has_head_ ? status_.source : source_) || (source_ == kAnySource && engine().size() == 2);
}

std::string Receive::describe() const {
  return str("recv of ", out_.count, " ", name(out_.dtype), " from ", peer_text(source_), " with ", tag_text(tag_),
             " (group '", engine().name(), "')");
}

std::vector<int> Receive::waits_for() {
  if (has_head_) return {status_.source};
  if (source_ != kAnySource) return {source_};
  std::vector<int> all;
  for (int rank = 0; rank < engine().size(); ++rank) all.push_back(rank);
  return all;
}

bool Receive::cancel() {
  if (finished()) return false;
  if (!engine().inbox().withdraw(*this)) return false;
  fail(std::make_exception_ptr(TimeoutError(describe() + ": given up, no message had come")));
  return true;
}

void Receive::give_up() {
  engine().inbox().withdraw(*this);
  body_.abandon(engine().messenger());
}

}  // namespace samestep
