#include "tcp/connection.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/format.h"
#include "kernels/stream.h"

namespace samestep::tcp {
namespace {

constexpr std::size_t kStage = 32 << 10;
constexpr std::size_t kMaxParts = 16;
constexpr int kMaxReads = 8;  // before other connections are served
constexpr Seconds kReadPolls{8};

iovec part(const std::byte* data, std::size_t nbytes) { return {const_cast<std::byte*>(data), nbytes}; }

}  // namespace

Connection::Connection(int peer, TcpSocket socket, std::string where)
    : peer_(peer), socket_(std::move(socket)), where_(std::move(where)), stage_(kStage) {}

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
  lost_ = true;
  reason_ = str("its connection, from ", where_, ", has ended: ", why);
  socket_.close();
  outgoing_.clear();
  rts_sent_.clear();
  sent_ = 0;
  left_ = 0;
  destination_ = {};
}

void Connection::check_heartbeat() {
  if (!lost_ && socket_.silent(kReadPolls)) end(str("its host has been silent for ", kReadPolls.count(), " s"));
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

void Connection::send_data(RequestState* record, std::uint64_t group, std::uint32_t id) {
  if (lost_) return;
  // Not queued as frames yet: `flush` makes a data frame only when nothing else waits, so that short messages overtake
  // a long one.
  rts_sent_.push_back({record, group, id});
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
  first.at += nbytes;
  if (last) rts_sent_.pop_front();
}

void Connection::flush() {
  while (writable_ && !lost_ && !all_sent()) {
    if (outgoing_.empty()) queue_data();
    std::array<iovec, kMaxParts> parts;
    std::size_t n = 0, skip = sent_;
    // Several frames in one system call, each as a header and a body, straight from the user's memory.
    for (const Outgoing& out : outgoing_) {
      if (n + 2 > kMaxParts) break;
      if (skip < sizeof(Frame)) {
        parts[n++] = part(reinterpret_cast<const std::byte*>(&out.frame) + skip, sizeof(Frame) - skip);
        skip = sizeof(Frame);
      }
      if (const std::size_t at = skip - sizeof(Frame); at < out.bytes.size()) {
        parts[n++] = part(out.bytes.data() + at, out.bytes.size() - at);
      }
      skip = 0;
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
    const std::size_t whole = sizeof(Frame) + first.bytes.size();
    if (sent_ < whole) return;
    sent_ -= whole;
    if (first.request != nullptr) first.request->ended = true;
    outgoing_.pop_front();
  }
}

void Connection::forget(std::uint64_t group) {
  if (frame_.group == group) destination_ = {};
  std::erase_if(rts_sent_, [group](const RtsSent& o) { return o.group == group; });
  for (std::size_t i = 0; i < outgoing_.size(); ++i) {  // none is erased, because frames are numbered
    Outgoing& out = outgoing_[i];
    if (out.frame.group != group) continue;
    out.request = nullptr;
    if (out.bytes.empty()) continue;
    // The frame has been sent in part. The receiver needs what remains to find the next frame, but the memory belongs
    // to the caller again: so it is copied. Other frames become notices that the group is closed, which is true.
    if (i == 0 && sent_ > 0) {
      half_sent_.assign(out.bytes.begin(), out.bytes.end());
      out.bytes = half_sent_;
    } else {
      out.frame.kind = Frame::Kind::leave;
      out.frame.nbytes = 0;
      out.bytes = {};
    }
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
  if (straight > 0) {
    destination_.at += straight;
    left_ -= straight;
    if (left_ == 0) end_frame(receiver);
  }
  end_ += outcome.nbytes - straight;
  consume(receiver);
  // Fewer bytes than there was room for: the socket is empty, and the poller, which reports changes only, will report
  // the next ones. After a hang-up nothing is reported any more, so the socket is read until its end.
  if (outcome.nbytes == wanted || hung_up_) return true;
  readable_ = false;  // all read; the poller reports when there is more
  return false;
}

void Connection::consume(Receiver& receiver) {
  for (;;) {
    const std::size_t take = std::min(left_, end_ - begin_);
    if (take > 0) {
      if (destination_.at != nullptr) {
        kernels::copy(destination_.at, stage_.data() + begin_, take);
        destination_.at += take;
      }
      begin_ += take;
      left_ -= take;
      if (left_ > 0) break;
      end_frame(receiver);
    }
    if (left_ > 0 || end_ - begin_ < sizeof(Frame) || lost_) break;
    if (!begin_frame(receiver)) return;
  }
  const std::size_t n_left = end_ - begin_;
  if (n_left > 0 && begin_ > 0) std::memmove(stage_.data(), stage_.data() + begin_, n_left);
  begin_ = 0;
  end_ = n_left;
}

bool Connection::begin_frame(Receiver& receiver) {
  std::memcpy(&frame_, stage_.data() + begin_, sizeof frame_);
  begin_ += sizeof frame_;
  // Also the first frame of another version of the protocol has another number, see kFirstSequence.
  if (frame_.sequence != next_in_++ || !is_valid(frame_)) {
    end("it sent what no rank of this version sends");
    return false;
  }
  left_ = has_bytes(frame_) ? frame_.nbytes : 0;
  destination_ = receiver.destination_of(peer_, frame_);
  if (left_ == 0) end_frame(receiver);
  return true;
}

void Connection::end_frame(Receiver& receiver) {
  const Destination place = destination_;
  destination_ = {};
  receiver.take(peer_, frame_, place);
}

}  // namespace samestep::tcp
