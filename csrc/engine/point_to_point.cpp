#include "engine/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "transport/tags.h"

namespace samestep {
namespace {

std::string peer_text(int peer) { return peer == kAnySource ? "any rank" : str("rank ", peer); }
std::string tag_text(int tag) { return tag == kAnyTag ? "any tag" : str("tag ", tag); }

/// Calls `act` with the offset and length of each segment of a body.
template <class Act>
void for_each_segment(std::size_t nbytes, std::size_t most, Act act) {
  for (std::size_t at = 0; at < nbytes; at += most) act(at, std::min(most, nbytes - at));
}

}  // namespace

void Send::begin(std::uint64_t) {
  const std::size_t nbytes = args_.in.nbytes();
  const bool is_eager = segments_ == nullptr && transport().is_eager(args_.in.data, sizeof(MessageHeader) + nbytes);
  // The elements of a long message follow in a body with a tag of its own. The receive learns that tag from the header,
  // and then receives the body directly into the user's buffer.
  const MessageHeader header{args_.in.count, MessageHeader::kind_of(args_.in.dtype, args_.is_object),
                             is_eager ? kInlineBody : engine().next_body_id(), args_.tag};
  head_.resize(sizeof header + (is_eager ? nbytes : 0));
  std::memcpy(head_.data(), &header, sizeof header);
  if (is_eager) kernels::copy(head_.data() + sizeof header, args_.in.data, nbytes);
  head_request_ = transport().send(head_.data(), head_.size(), args_.dest, tags::kUserMessage);
  if (!is_eager) {
    const std::size_t segment = engine().segment_nbytes(nbytes);
    const auto* const data = static_cast<const std::byte*>(args_.in.data);
    for_each_segment(segments_ != nullptr ? segment : nbytes, segment, [&](std::size_t at, std::size_t n) {
      body_.send(transport(), data + at, n, args_.dest, tags::of_body(header.body));
    });
    if (segments_ != nullptr) {
      engine().open_body(header.body);
      *segments_ = {args_.dest, header.body, nbytes, segment, what()};
    }
  }
  engine().count_message(nbytes);
}

bool Send::advance() { return transport().test(head_request_) && body_.test(transport()); }

std::string Send::what() const {
  const std::string what = args_.is_object ? "send_object" : str("send of ", args_.in.count, " ", name(args_.in.dtype));
  return str(what, " to rank ", args_.dest, " with ", tag_text(args_.tag));
}

void Receive::begin(std::uint64_t) { engine().inbox().post_receive(*this, args_.source, args_.tag); }

void Receive::take(int source, const MessageHeader& sent, std::span<const std::byte> elements) {
  has_head_ = true;
  sent_ = sent;
  status_ = {source, sent.tag, sent.count};
  if (args_.fit == Fit::object && sent.is_object()) {
    object_.resize(sent.nbytes());
    args_.out = {object_.data(), object_.size(), DType::uint8};
  }
  fits_ = sent.fits(args_.out, args_.fit);
  const std::size_t nbytes = sent.nbytes();
  has_body_ = sent.body == kInlineBody;
  if (has_body_) {
    if (fits_ && args_.out.device.kind != DeviceKind::cpu) {  // which the host cannot write to
      object_.assign(elements.begin(), elements.begin() + static_cast<std::ptrdiff_t>(nbytes));
    } else if (fits_) {
      kernels::copy(args_.out.data, elements.data(), nbytes);
    }
    return;
  }
  if (fits_ && segments_ != nullptr) {
    *segments_ = {source, sent.body, nbytes, engine().segment_nbytes(nbytes), what()};
    has_body_ = true;
    return;
  }
  // A body that does not fit is received all the same: its sender waits for that, and its tag is used again later.
  if (!fits_) unwanted_.resize(nbytes);
  if (!fits_ || may_write_.load(std::memory_order_acquire)) receive_body();  // pairs with begin_writes
}

void Receive::receive_body() {
  has_body_ = true;
  auto* const data = fits_ ? static_cast<std::byte*>(args_.out.data) : unwanted_.data();
  const std::size_t nbytes = sent_.nbytes();
  for_each_segment(nbytes, engine().segment_nbytes(nbytes), [&](std::size_t at, std::size_t n) {
    body_.receive(transport(), data + at, n, status_.source, tags::of_body(sent_.body));
  });
}

bool Receive::advance() {
  if (!has_head_) return false;
  if (!has_body_) {
    if (!may_write_.load(std::memory_order_acquire)) return false;  // pairs with begin_writes
    receive_body();
  }
  // The error comes after the body: until then the transport writes to `unwanted_`.
  if (!body_.test(transport())) return false;
  if (!fits_) throw_mismatch();
  if (is_given_back_) hand_over();
  return true;
}

void Receive::throw_mismatch() const {
  throw MismatchError(unfit_text(describe(), status_, sent_.dtype(), sent_.is_object(), args_.fit));
}

bool Receive::needs(int peer, std::uint64_t) {
  if (has_head_) return peer == status_.source;
  // The receive accepts any rank: the lost one may have been about to send.
  return args_.source == kAnySource ? !engine().departures().is_harmless(peer) : peer == args_.source;
}

std::string Receive::what() const {
  const std::string what =
      args_.fit == Fit::object ? "recv_object" : str("recv of ", args_.out.count, " ", name(args_.out.dtype));
  return str(what, " from ", peer_text(args_.source), " with ", tag_text(args_.tag));
}

std::vector<int> Receive::pending_peers_of_operation() {
  if (has_head_) return {status_.source};
  if (args_.source != kAnySource) return {args_.source};
  std::vector<int> others;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != this->rank() && !engine().departures().has_left(rank)) others.push_back(rank);
  }
  return others;
}

bool Receive::cancel() {
  // Unlike most functions of operations this one is called by the user's thread, without the mutex.
  const std::lock_guard lock(engine().mutex());
  if (finished()) return false;
  if (!withdraw()) return false;
  fail(std::make_exception_ptr(TimeoutError(describe() + ": given up, no message had come")));
  return true;
}

bool Receive::give_back() {
  const std::lock_guard lock(engine().mutex());
  if (cancel()) return true;
  // The error of a message that does not fit has consumed it. What lies on a device cannot be read here.
  const bool can = has_head_ && fits_ && segments_ == nullptr && args_.out.device.kind == DeviceKind::cpu;
  if (!can || is_given_back_ || (finished() && error())) return is_given_back_;
  is_given_back_ = true;
  engine().inbox().give_back(*this, status_.source, sent_);
  if (finished()) hand_over();
  return true;
}

void Receive::hand_over() {
  engine().inbox().complete(*this, {static_cast<const std::byte*>(args_.out.data), sent_.nbytes()});
}

bool Probe::advance() {
  Status status;
  // The message stays in the inbox, where the next receive that matches finds it first.
  if (!engine().inbox().probe(source(), tag(), status)) return false;
  set_status(status);
  return true;
}

std::string Probe::what() const {
  return str("probe for a message from ", peer_text(source()), " with ", tag_text(tag()));
}

void Receive::abort() {
  engine().inbox().withdraw(*this);
  body_.abandon(transport());
}

void BodySegment::begin(std::uint64_t) {
  const int tag = tags::of_body(body_.number);
  const std::size_t nbytes = std::min(body_.segment_nbytes, body_.nbytes - offset_);
  if (sent_ != nullptr) {
    request_.send(transport(), sent_, nbytes, body_.peer, tag);
  } else {
    request_.receive(transport(), received_, nbytes, body_.peer, tag);
  }
}

bool BodySegment::advance() {
  if (!request_.test(transport())) return false;
  end_body();
  return true;
}

void BodySegment::abort() {
  request_.abandon(transport());
  end_body();
}

void BodySegment::end_body() {
  // The receiver has posted its receive, and so those before it.
  if (sent_ != nullptr && offset_ + body_.segment_nbytes >= body_.nbytes) engine().close_body(body_.number);
}

}  // namespace samestep
