#include "tcp/connection.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/format.h"
#include "kernels/stream.h"

namespace samestep::tcp {
namespace {

constexpr std::size_t kStage = 32 << 10;
constexpr std::size_t kMostParts = 16;
constexpr int kMostReads = 8;  // before others have their turn
constexpr Seconds kPatience{8};

iovec part(const std::byte* data, std::size_t nbytes) { return {const_cast<std::byte*>(data), nbytes}; }

}  // namespace

Connection::Connection(int peer, TcpSocket socket, std::string where)
    : peer_(peer), socket_(std::move(socket)), where_(std::move(where)), stage_(kStage) {}

void Connection::ready(bool readable, bool writable, bool hung_up) {
  readable_ |= readable || hung_up;
  writable_ |= writable || hung_up;
  hung_up_ |= hung_up;
}

void Connection::advance(Receiver& receiver) {
  reads_on_ = readable_;
  for (int i = 0; i < kMostReads && reads_on_ && !lost_; ++i) reads_on_ = read(receiver);
  if (!lost_ && writable_ && !all_sent()) flush();
}

void Connection::end(const std::string& why) {
  if (lost_) return;
  lost_ = true;
  reason_ = str("its connection, from ", where_, ", has ended: ", why);
  socket_.close();
  outgoing_.clear();
  offered_.clear();
  sent_ = 0;
  left_ = 0;
  place_ = {};
}

void Connection::listen_for_silence() {
  if (!lost_ && socket_.silent(kPatience)) end(str("its host has been silent for ", kPatience.count(), " s"));
}

// ---- what goes out

void Connection::send(const Frame& frame, Bytes bytes, Record* record) {
  if (lost_) return;
  const bool first = all_sent();
  queue(frame, bytes, record);
  if (first) {
    writable_ = true;  // worth a try
    flush();
  }
}

void Connection::send_offered(Record* record, std::uint64_t group, std::uint32_t id) {
  if (lost_) return;
  offered_.push_back({record, group, id});
  flush();
}

void Connection::queue(const Frame& frame, Bytes bytes, Record* record) {
  outgoing_.push_back({frame, bytes, record});
  outgoing_.back().frame.sequence = next_out_++;
}

void Connection::queue_piece() {
  Offered& first = offered_.front();
  const std::size_t nbytes = std::min(kPiece, first.record->nbytes - first.at);
  const bool last = first.at + nbytes == first.record->nbytes;
  const Bytes bytes(first.record->from + first.at, nbytes);
  queue({first.group, nbytes, 0, Frame::Kind::piece, 0, first.id}, bytes, last ? first.record : nullptr);
  first.at += nbytes;
  if (last) offered_.pop_front();
}

void Connection::flush() {
  while (writable_ && !lost_ && !all_sent()) {
    if (outgoing_.empty()) queue_piece();
    std::array<iovec, kMostParts> parts;
    std::size_t n = 0, skip = sent_;
    for (const Outgoing& out : outgoing_) {
      if (n + 2 > kMostParts) break;
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
    outgoing_.clear();  // nobody takes it; what the peer sent before may still be read, and then it has ended
    offered_.clear();
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
    if (first.record != nullptr) first.record->ended = true;
    outgoing_.pop_front();
  }
}

void Connection::forget(std::uint64_t group) {
  if (frame_.group == group) place_ = {};
  std::erase_if(offered_, [group](const Offered& o) { return o.group == group; });
  for (std::size_t i = 0; i < outgoing_.size(); ++i) {  // none is erased, for frames are numbered
    Outgoing& out = outgoing_[i];
    if (out.frame.group != group) continue;
    out.record = nullptr;
    if (out.bytes.empty()) continue;
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

// ---- what comes in

void Connection::forget_place(const Record* record) {
  if (place_.record == record) place_ = {};
}

/// True if there may be more at once.
bool Connection::read(Receiver& receiver) {
  std::array<iovec, 2> parts;
  std::size_t n = 0, wanted = 0, direct = 0;
  if (left_ > 0 && place_.at != nullptr) {
    parts[n++] = part(place_.at, left_);
    direct = left_;
  }
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
    place_.at += straight;
    left_ -= straight;
    if (left_ == 0) end_frame(receiver);
  }
  end_ += outcome.nbytes - straight;
  consume(receiver);
  if (outcome.nbytes == wanted || hung_up_) return true;
  readable_ = false;  // that was all; the poller tells when there is more
  return false;
}

void Connection::consume(Receiver& receiver) {
  for (;;) {
    const std::size_t take = std::min(left_, end_ - begin_);
    if (take > 0) {
      if (place_.at != nullptr) {
        kernels::copy(place_.at, stage_.data() + begin_, take);
        place_.at += take;
      }
      begin_ += take;
      left_ -= take;
      if (left_ > 0) break;
      end_frame(receiver);
    }
    if (left_ > 0 || end_ - begin_ < sizeof(Frame) || lost_) break;
    if (!begin_frame(receiver)) return;
  }
  const std::size_t rest = end_ - begin_;
  if (rest > 0 && begin_ > 0) std::memmove(stage_.data(), stage_.data() + begin_, rest);
  begin_ = 0;
  end_ = rest;
}

bool Connection::begin_frame(Receiver& receiver) {
  std::memcpy(&frame_, stage_.data() + begin_, sizeof frame_);
  begin_ += sizeof frame_;
  if (frame_.sequence != next_in_++ || !is_valid(frame_)) {
    end("it sent what no rank of this version sends");
    return false;
  }
  left_ = has_bytes(frame_) ? frame_.nbytes : 0;
  place_ = receiver.place_for(peer_, frame_);
  if (left_ == 0) end_frame(receiver);
  return true;
}

void Connection::end_frame(Receiver& receiver) {
  const Place place = place_;
  place_ = {};
  receiver.take(peer_, frame_, place);
}

}  // namespace samestep::tcp
