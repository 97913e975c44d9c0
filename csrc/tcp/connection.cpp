#include "tcp/connection.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/format.h"
#include "kernels/stream.h"
#include "os/poller.h"

namespace samestep::tcp {
namespace {

constexpr std::size_t kStage = 32 << 10;
constexpr std::size_t kMaxParts = 24;
constexpr int kMaxReads = 8;  // before other connections are served
constexpr Seconds kFarewell{1};
constexpr std::chrono::milliseconds kPause{20};

iovec part(const std::byte* data, std::size_t nbytes) { return {const_cast<std::byte*>(data), nbytes}; }

}  // namespace

Connection::Connection(int peer, TcpPeer end, std::string here)
    : peer_(peer),
      socket_(std::move(end.fd)),
      where_(std::move(end.where)),
      here_(std::move(here)),
      out_(end.send_key, AesGcm::Direction::seals),
      stage_(kStage),
      in_(end.receive_key, AesGcm::Direction::opens) {}

void Connection::ready(bool readable, bool writable, bool hung_up) {
  // A connection that has hung up is read and written once more: what the peer has sent before is not lost, and the
  // system call returns the reason.
  readable_ |= readable || hung_up;
  writable_ |= writable || hung_up;
  hung_up_ |= hung_up;
}

void Connection::advance(Receiver& receiver) {
  reads_on_ = readable_;
  for (int i = 0; i < kMaxReads && reads_on_ && !lost_; ++i) reads_on_ = read(receiver);
  if (!lost_ && writable_ && !all_sent()) flush();
}

void Connection::end(const std::string& why) {
  if (lost_) return;
  drop(why);
  socket_.close();
}

void Connection::drop(const std::string& why) {
  lost_ = true;
  reason_ = str("its connection, from ", where_, ", has ended: ", why);
  outgoing_.clear();
  rts_sent_.clear();
  sent_ = 0;
  left_ = 0;
  destination_ = {};
}

void Connection::end_damaged(bool sent) {
  if (lost_) return;
  if (!sent) tell_of_damage();
  const std::string peer = str("rank ", peer_);
  drop(str("bytes from ", sent ? here_ : peer, " to ", sent ? peer : here_,
           " were changed on the way, as their checksum shows: a network card, a switch or memory is faulty, or an "
           "array was changed while it was sent"));
  socket_.close();
}

/// Otherwise the peer would learn only that the connection has ended. If this rank closed it while bytes come in, the
/// kernel would reset it, and the peer's kernel would discard what the peer has not read. So this rank reads on until
/// the peer has closed it, for a short time.
void Connection::tell_of_damage() {
  rts_sent_.clear();
  // What is sent in part, or encrypted, is sent to its end. Nothing else delays the notice.
  const auto is_begun = [&](const Outgoing& out) {
    return (sent_ > 0 && &out == &outgoing_.front()) || (out.sealed && out_.encrypts());
  };
  const auto rest = std::ranges::find_if_not(outgoing_, is_begun);
  if (rest != outgoing_.end()) next_out_ = rest->frame.sequence;
  outgoing_.erase(rest, outgoing_.end());
  queue({0, 0, 0, Frame::Kind::damage, 0, 0}, {}, nullptr);
  const std::array<iovec, 1> unread{part(stage_.data(), stage_.size())};
  for (const Deadline deadline = Deadline::after(kFarewell); !deadline.passed();) {
    writable_ = true;
    flush();
    if (all_sent()) socket_.end_sending();
    const TcpSocket::Outcome outcome = socket_.read(unread);
    if (outcome.kind == TcpSocket::Outcome::Kind::ended) return;
    if (outcome.kind == TcpSocket::Outcome::Kind::later) wait_until_ready(socket_.fd(), !all_sent(), kPause);
  }
}

void Connection::check_heartbeat() {
  if (lost_ || !socket_.silent()) return;
  end(str("its host has been silent for ", TcpSocket::patience().count(), " s"));
}

// ---- sending

void Connection::send(const Frame& frame, Bytes bytes, RequestState* record) {
  // Silently: `Mesh::failure` reports the loss.
  if (lost_) return;
  const bool first = all_sent();
  queue(frame, bytes, record);
  if (first) {
    writable_ = true;  // perhaps; the next send finds out
    flush();
  }
}

void Connection::send_data(RequestState* record, std::uint64_t group, std::uint32_t id, bool detached) {
  if (lost_) return;
  // Not queued as frames yet: `flush` makes a data frame only when nothing else waits, so that short messages overtake
  // a long one.
  rts_sent_.push_back({record, group, id, detached});
  flush();
}

void Connection::queue(const Frame& frame, Bytes bytes, RequestState* record) {
  outgoing_.push_back({frame, bytes, record});
  outgoing_.back().frame.sequence = next_out_++;
}

void Connection::queue_data() {
  RtsSent& first = rts_sent_.front();
  const std::size_t nbytes = std::min(kDataFrameBytes, first.request->nbytes - first.at);
  const bool last = first.at + nbytes == first.request->nbytes;
  const Bytes bytes(first.request->from + first.at, nbytes);
  queue({first.group, nbytes, 0, Frame::Kind::data, 0, first.id}, bytes, last ? first.request : nullptr);
  outgoing_.back().detached = first.detached;
  first.at += nbytes;
  if (last) rts_sent_.pop_front();
}

/// False if the frame has to wait until those before it have been sent.
bool Connection::seal(Outgoing& out) {
  if (out.sealed) return true;
  const bool encrypts = out_.encrypts(), first = &out == &outgoing_.front();
  if (first) copied_ = 0;
  const std::size_t nbytes = out.bytes.size();
  const bool fits = encrypts ? copied_ + nbytes <= kDataFrameBytes : !out.detached;
  if (nbytes > 0 && !first && !fits) return false;
  if (out.detached && !encrypts) use_copy(out);
  out.sealed = true;
  std::memcpy(out.head.data(), &out.frame, sizeof out.frame);
  out_.seal(Bytes(out.head).first(sizeof out.frame), out.head.data(), out.head.data() + sizeof out.frame);
  if (nbytes == 0) return true;
  if (encrypts) copy_.resize(kDataFrameBytes);
  std::byte* const encrypted = copy_.data() + copied_;
  out_.seal(out.bytes, encrypted, out.tail.data());
  if (!encrypts) return true;
  out.bytes = {encrypted, nbytes};
  copied_ += nbytes;
  return true;
}

/// The memory of the frame may change. True if the frame may, too, since nothing of it has been sent.
bool Connection::detach(Outgoing& out) {
  out.detached = true;
  if (out.sealed && out_.encrypts()) return false;  // its bytes are copies already
  if (&out != &outgoing_.front() || sent_ == 0) {
    out.sealed = false;
    return true;
  }
  use_copy(out);
  return false;
}

void Connection::use_copy(Outgoing& out) {
  if (out.bytes.data() != copy_.data()) copy_.assign(out.bytes.begin(), out.bytes.end());
  out.bytes = copy_;
}

void Connection::flush() {
  while (writable_ && !lost_ && !all_sent()) {
    if (outgoing_.empty()) queue_data();
    std::array<iovec, kMaxParts> parts;
    std::size_t n = 0, skip = sent_;
    const auto add = [&](Bytes bytes) {
      if (skip < bytes.size()) parts[n++] = part(bytes.data() + skip, bytes.size() - skip);
      skip -= std::min(skip, bytes.size());
    };
    // Several frames in one system call, each as a header and a body, straight from the user's memory.
    for (Outgoing& out : outgoing_) {
      if (n + 3 > kMaxParts || !seal(out)) break;
      add(Bytes(out.head).first(sizeof(Frame) + out_.tag_nbytes()));
      if (out.bytes.empty()) continue;
      add(out.bytes);
      add(Bytes(out.tail).first(out_.tag_nbytes()));
    }
    const TcpSocket::Outcome outcome = socket_.write(std::span(parts).first(n));
    if (outcome.kind == TcpSocket::Outcome::Kind::moved) {
      sent(outcome.nbytes);
      continue;
    }
    writable_ = false;
    if (outcome.kind == TcpSocket::Outcome::Kind::later) return;
    outgoing_.clear();  // nobody receives it; what the peer has sent may still be read before the connection ends
    rts_sent_.clear();
    sent_ = 0;
    hung_up_ = readable_ = true;
  }
}

void Connection::sent(std::size_t nbytes) {
  sent_ += nbytes;
  while (!outgoing_.empty()) {
    const Outgoing& first = outgoing_.front();
    const std::size_t tag = out_.tag_nbytes();
    const std::size_t whole = sizeof(Frame) + tag + (first.bytes.empty() ? 0 : first.bytes.size() + tag);
    if (sent_ < whole) return;
    sent_ -= whole;
    if (first.request != nullptr) first.request->ended = true;
    outgoing_.pop_front();
  }
}

void Connection::forget(std::uint64_t group) {
  if (frame_.group == group) destination_ = {};
  std::erase_if(rts_sent_, [group](const RtsSent& o) { return o.group == group; });
  for (Outgoing& out : outgoing_) {  // none is erased, because frames are numbered
    if (out.frame.group != group) continue;
    out.request = nullptr;
    // The receiver needs what remains of a frame that has been sent in part to find the next one. Other frames become
    // notices that the group is closed, which is true.
    if (out.bytes.empty() || !detach(out)) continue;
    out.frame.kind = Frame::Kind::leave;
    out.frame.nbytes = 0;
    out.bytes = {};
  }
}

void Connection::detach_sends(std::uint64_t group) {
  for (RtsSent& message : rts_sent_) message.detached |= message.group == group;
  for (Outgoing& out : outgoing_) {
    if (out.frame.group == group) detach(out);
  }
}

// ---- receiving

void Connection::forget_destination(const RequestState* record) {
  if (destination_.request == record) destination_ = {};
}

/// True if more data may be available now.
bool Connection::read(Receiver& receiver) {
  std::array<iovec, 2> parts;
  std::size_t n = 0, wanted = 0, direct = 0;
  if (left_ > 0 && destination_.at != nullptr) {
    parts[n++] = part(destination_.at, left_);
    direct = left_;
  }
  // One system call reads the body directly to its destination, and what follows it into the stage.
  parts[n++] = part(stage_.data() + end_, stage_.size() - end_);
  wanted = direct + stage_.size() - end_;
  const TcpSocket::Outcome outcome = socket_.read(std::span(parts).first(n));
  if (outcome.kind == TcpSocket::Outcome::Kind::later) {
    readable_ = false;
    return false;
  }
  if (outcome.kind == TcpSocket::Outcome::Kind::ended) {
    end(outcome.why);
    return false;
  }
  const std::size_t straight = std::min(direct, outcome.nbytes);
  if (straight > 0) take_body(destination_.at, straight);
  end_ += outcome.nbytes - straight;
  consume(receiver);
  // Fewer bytes than there was room for: the socket is empty, and the poller, which reports changes only, will report
  // the next ones. After a hang-up nothing is reported any more, so the socket is read until its end.
  if (outcome.nbytes == wanted || hung_up_) return true;
  readable_ = false;  // all read; the poller reports when there is more
  return false;
}

void Connection::consume(Receiver& receiver) {
  while (!lost_) {
    const std::size_t take = std::min(left_, end_ - begin_);
    if (take > 0) {
      std::byte* const bytes = stage_.data() + begin_;
      std::byte* const to = destination_.at;
      take_body(bytes, take);
      if (to != nullptr) kernels::copy(to, bytes, take);
      begin_ += take;
    }
    if (left_ > 0 || end_ - begin_ < (in_body_ ? 0 : sizeof(Frame)) + in_.tag_nbytes()) break;
    if (!(in_body_ ? end_body(receiver) : begin_frame(receiver))) return;
  }
  const std::size_t n_left = end_ - begin_;
  if (n_left > 0 && begin_ > 0) std::memmove(stage_.data(), stage_.data() + begin_, n_left);
  begin_ = 0;
  end_ = n_left;
}

void Connection::take_body(std::byte* bytes, std::size_t nbytes) {
  in_.open(bytes, nbytes);
  if (destination_.at != nullptr) destination_.at += nbytes;
  left_ -= nbytes;
}

bool Connection::begin_frame(Receiver& receiver) {
  std::byte* const at = stage_.data() + begin_;
  begin_ += sizeof frame_ + in_.tag_nbytes();
  in_.open(at, sizeof frame_);
  if (!in_.check(at + sizeof frame_)) {  // before any of its numbers is used
    end_damaged(/*sent=*/false);
    return false;
  }
  std::memcpy(&frame_, at, sizeof frame_);
  // Also the first frame of another version of the protocol has another number, see kFirstSequence.
  if (frame_.sequence != next_in_++ || !is_valid(frame_)) {
    end("it sent what no rank of this version sends");
    return false;
  }
  left_ = has_bytes(frame_) ? frame_.nbytes : 0;
  in_body_ = left_ > 0;
  destination_ = receiver.destination_of(peer_, frame_);
  if (!in_body_) end_frame(receiver);
  return true;
}

bool Connection::end_body(Receiver& receiver) {
  const bool intact = in_.check(stage_.data() + begin_);
  begin_ += in_.tag_nbytes();
  in_body_ = false;
  intact ? end_frame(receiver) : end_damaged(/*sent=*/false);
  return intact;
}

void Connection::end_frame(Receiver& receiver) {
  const Destination place = destination_;
  destination_ = {};
  receiver.take(peer_, frame_, place);
}

}  // namespace samestep::tcp
