#include "node/mailbox.h"

#include <algorithm>
#include <cstring>

#include "communicator/communicator.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/prefetch.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t aligned(std::size_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }

double seconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

/// Out of a ring, or of what was kept: in either case this rank's until it has told.
void take(std::byte* to, const std::byte* from, std::size_t nbytes) {
  kernels::take_lines(to, const_cast<std::byte*>(from), nbytes);
}

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Arena> arena, std::shared_ptr<Host> host, std::vector<int> members, int rank)
    : arena_(std::move(arena)),
      host_(std::move(host)),
      members_(std::move(members)),
      rank_(rank),
      outgoing_(members_.size()),
      reported_(members_.size()) {}

Mailbox::Record* Mailbox::new_record() {
  auto record = std::make_unique<Record>();
  Record* const key = record.get();
  records_.emplace(key, std::move(record));
  return key;
}

void Mailbox::drop(Record* record) { records_.erase(record); }

// ---- what goes out

bool Mailbox::write(int dest, const Frame& frame, Bytes bytes, Bytes more) {
  Arena::Ring& ring = arena_->ring(rank_, dest);
  const std::size_t room = arena_->ring_nbytes();
  std::uint64_t written = ring.written.value.load(std::memory_order_relaxed);
  const std::uint64_t read = ring.read.value.load(std::memory_order_acquire);
  const std::size_t at = written % room;
  const std::size_t fill = at + frame.nbytes > room ? room - at : 0;
  if (written + fill + frame.nbytes - read > room) return false;
  if (fill != 0) {
    const Frame rest{static_cast<std::uint32_t>(fill), Kind::fill, 0, 0, 0, 0};
    std::memcpy(ring.bytes() + at, &rest, sizeof rest);
    written += fill;
  }
  std::byte* const place = ring.bytes() + written % room;
  std::memcpy(place, &frame, sizeof frame);
  kernels::copy(place + sizeof frame, bytes.data(), bytes.size());
  kernels::copy(place + sizeof frame + bytes.size(), more.data(), more.size());
  ring.written.value.store(written + frame.nbytes, std::memory_order_release);
  arena_->ring_bells(rank_);
  if (frame.nbytes <= Arena::kReadSoonest) {
    kernels::expect_to_be_read(place, frame.nbytes);
    kernels::expect_to_be_read(&ring.written, sizeof ring.written);
  }
  return true;
}

void Mailbox::post(int dest, const Outgoing& outgoing) {
  auto& queue = outgoing_[static_cast<std::size_t>(dest)];
  if (queue.empty() && write(dest, outgoing.frame, outgoing.bytes)) {
    return sent(outgoing);
  }
  queue.push_back(outgoing);
}

void Mailbox::sent(const Outgoing& outgoing) {
  if (outgoing.record == nullptr) return;
  outgoing.record->ended = true;
  if (outgoing.frame.kind == Kind::piece) offered_.erase(outgoing.frame.id);
}

void Mailbox::flush(int dest) {
  auto& queue = outgoing_[static_cast<std::size_t>(dest)];
  while (!queue.empty() && write(dest, queue.front().frame, queue.front().bytes)) {
    sent(queue.front());
    queue.pop_front();
  }
}

bool Mailbox::is_short(const void* data, std::size_t nbytes) const {
  constexpr std::size_t kCopied = 40 << 10;  // of shared memory, which the receiver copies but once
  if (nbytes > longest_message()) return false;
  return nbytes <= kCopied || (host_->place_of(data, nbytes) & Host::kShared) == 0;
}

Messenger::Request Mailbox::send(const void* data, std::size_t nbytes, int dest, int tag) {
  const auto* bytes = static_cast<const std::byte*>(data);
  Record* const record = new_record();
  record->from = bytes;
  record->nbytes = nbytes;
  record->peer = dest;
  const Request request{reinterpret_cast<std::uintptr_t>(record), true};
  if (dest == rank_) {
    arrive({rank_, tag, nbytes, {}, 0, 0, false}, bytes);
    record->ended = true;
  } else if (is_short(data, nbytes)) {
    const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + nbytes));
    post(dest, {{total, Kind::message, tag, 0, nbytes, 0}, {bytes, nbytes}, record});
  } else {
    const std::uint32_t id = next_id_++;
    offered_.emplace(id, record);
    const Kind kind = waited_for() ? Kind::helped : Kind::offer;
    post(dest, {{kAlign, kind, tag, id, nbytes, host_->place_of(data, nbytes)}, {}, nullptr});
  }
  return request;
}

bool Mailbox::send_at_once(Bytes head, Bytes body, int dest, int tag) {
  const std::size_t nbytes = head.size() + body.size();
  if (dest == rank_ || !is_short(body.data(), nbytes) || !outgoing_[static_cast<std::size_t>(dest)].empty())
    return false;
  const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + nbytes));
  return write(dest, {total, Kind::message, tag, 0, nbytes, 0}, head, body);
}

void Mailbox::send_pieces(Record& record, std::uint32_t id) {
  constexpr std::size_t kPieces = 4, kLeast = 16 << 10;
  const std::size_t most = std::min(std::max(aligned(record.nbytes / kPieces), kLeast), longest_message());
  for (std::size_t at = 0; at < record.nbytes;) {
    const std::size_t length = std::min(most, record.nbytes - at);
    const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + length));
    const bool last = at + length == record.nbytes;
    post(record.peer, {{total, Kind::piece, 0, id, length, 0}, {record.from + at, length}, last ? &record : nullptr});
    at += length;
  }
}

// ---- what comes in

bool Mailbox::matches(const Record& record, const Arrived& arrived) {
  return record.tag == arrived.tag && (record.peer == kAnySource || record.peer == arrived.source);
}

void Mailbox::arrive(Arrived arrived, const std::byte* bytes) {
  const auto met = std::find_if(posted_.begin(), posted_.end(), [&](Record* r) { return matches(*r, arrived); });
  if (met != posted_.end()) {
    Record& record = **met;
    posted_.erase(met);
    deliver(record, arrived, bytes);
    return;
  }
  if (arrived.address == 0) arrived.bytes.assign(bytes, bytes + arrived.length);
  arrived_.push_back(std::move(arrived));
}

void Mailbox::deliver(Record& record, const Arrived& arrived, const std::byte* bytes) {
  if (arrived.length > record.nbytes) {
    throw Error(str("a message of ", arrived.length, " bytes from rank ", arrived.source, " meets a receive of ",
                    record.nbytes));
  }
  record.envelope = {arrived.source, arrived.tag};
  record.nbytes = arrived.length;
  if (arrived.address == 0) {
    if (arrived.source == rank_) {
      kernels::copy(record.into, bytes, arrived.length);  // it may be read-only
    } else {
      take(record.into, bytes, arrived.length);
    }
    record.ended = true;
    return;
  }
  const int peer = members_[static_cast<std::size_t>(arrived.source)];
  if (const std::byte* here = host_->at(peer, arrived.address, arrived.length); here != nullptr) {
    constexpr std::size_t kBuffers = 4;  // of two ranks that exchange such messages
    kernels::copy_part(record.into, here, arrived.length, kBuffers * arrived.length);
  } else if (!fetch(record, arrived)) {
    return;
  }
  tell_taken(arrived.source, arrived.id);
  record.ended = true;
}

void Mailbox::tell_taken(int source, std::uint32_t id) {
  post(source, {{kAlign, Kind::taken, 0, id, 0, 0}, {}, nullptr});
}

/// False where it comes later, or never.
bool Mailbox::fetch(Record& record, const Arrived& arrived) {
  constexpr std::size_t kMost = 2 << 20;  // more leaves the caches on its way
  const bool kernel = host_->reaches_memory();
  const bool both_wait = kernel && arrived.is_helped && record.is_waited_for && arrived.length <= kMost;
  // Who pulls keeps the CPU for itself; how long that takes does not tell how long others wait for theirs.
  const bool by_time = both_wait && !oversubscribed_;
  const bool in_pieces = !kernel || (by_time ? ways_.next(arrived.length) == WayChoice::Way::staged : both_wait);
  const auto now = std::chrono::steady_clock::now();
  if (in_pieces) {
    record.in_pieces = true;
    record.id = arrived.id;
    record.address = arrived.address;
    record.asked = now;
    in_pieces_.emplace(std::pair(arrived.source, arrived.id), &record);
    post(arrived.source, {{kAlign, Kind::wanted, 0, arrived.id, 0, 0}, {}, nullptr});
    return false;
  }
  // Ends and farewells will tell who left first.
  if (!host_->pull(members_[static_cast<std::size_t>(arrived.source)], record.into, arrived.address, arrived.length))
    return false;
  if (by_time) ways_.took(arrived.length, WayChoice::Way::direct, seconds_since(now));
  return true;
}

void Mailbox::take_piece(int source, const Frame& frame, const std::byte* bytes) {
  const auto found = in_pieces_.find({source, frame.id});
  if (found == in_pieces_.end()) return;  // the rest has been pulled
  Record& record = *found->second;
  take(record.into + record.moved, bytes, frame.length);
  record.moved += frame.length;
  record.idle_tests = 0;
  if (record.moved == record.nbytes) end_pieces(record);
}

/// The sender has left its wait, or has no CPU.
void Mailbox::pull_rest(Record& record) {
  const int source = record.envelope.source;
  const bool pulled = host_->pull(members_[static_cast<std::size_t>(source)], record.into + record.moved,
                                  record.address + record.moved, record.nbytes - record.moved);
  // Meanwhile it may have sent the last piece and written to its memory again: then all pieces are here now.
  advance();
  if (record.ended || !pulled) return;
  tell_taken(source, record.id);
  end_pieces(record);
}

void Mailbox::end_pieces(Record& record) {
  ways_.took(record.nbytes, WayChoice::Way::staged, seconds_since(record.asked));
  in_pieces_.erase({record.envelope.source, record.id});
  record.in_pieces = false;
  record.ended = true;
}

void Mailbox::take_frame(int source, const Frame& frame, const std::byte* bytes) {
  switch (frame.kind) {
    case Kind::fill:
      return;
    case Kind::message:
      return arrive({source, frame.tag, frame.length, {}, 0, 0, false}, bytes);
    case Kind::offer:
    case Kind::helped:
      return arrive({source, frame.tag, frame.length, {}, frame.id, frame.address, frame.kind == Kind::helped},
                    nullptr);
    case Kind::wanted:
      return send_pieces(*offered_.at(frame.id), frame.id);
    case Kind::taken:
      return end_offer(source, frame.id);
    case Kind::piece:
      return take_piece(source, frame, bytes);
  }
}

void Mailbox::end_offer(int dest, std::uint32_t id) {
  const auto offered = offered_.find(id);
  if (offered == offered_.end()) return;  // its last piece was sent meanwhile
  offered->second->ended = true;
  offered_.erase(offered);
  std::erase_if(outgoing_[static_cast<std::size_t>(dest)], [id](const Outgoing& outgoing) {
    return outgoing.frame.kind == Kind::piece && outgoing.frame.id == id;
  });
}

void Mailbox::read(int source) {
  Arena::Ring& ring = arena_->ring(source, rank_);
  std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);
  while (read != ring.written.value.load(std::memory_order_acquire)) {
    const std::byte* const place = ring.bytes() + read % arena_->ring_nbytes();
    Frame frame;
    std::memcpy(&frame, place, sizeof frame);
    read += frame.nbytes;
    try {
      take_frame(source, frame, place + sizeof frame);
    } catch (...) {  // one message is lost, not the ring
      ring.read.value.store(read, std::memory_order_release);
      throw;
    }
    ring.read.value.store(read, std::memory_order_release);
    arena_->ring_bells(rank_);
  }
}

Mailbox::Bytes Mailbox::peek(int source, int tag) {
  if (source == rank_ || !arrived_.empty()) return {};
  Arena::Ring& ring = arena_->ring(source, rank_);
  const std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);
  if (read == ring.written.value.load(std::memory_order_acquire)) return {};
  const std::byte* const place = ring.bytes() + read % arena_->ring_nbytes();
  Frame frame;
  std::memcpy(&frame, place, sizeof frame);
  if (frame.kind == Kind::fill) {
    skip(source);
    return peek(source, tag);
  }
  if (frame.kind != Kind::message || frame.tag != tag) return {};
  return {place + sizeof frame, frame.length};
}

void Mailbox::skip(int source) {
  Arena::Ring& ring = arena_->ring(source, rank_);
  const std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);
  Frame frame;
  std::memcpy(&frame, ring.bytes() + read % arena_->ring_nbytes(), sizeof frame);
  ring.read.value.store(read + frame.nbytes, std::memory_order_release);
  arena_->ring_bells(rank_);
}

void Mailbox::advance() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    read(peer);
    flush(peer);
  }
}

Messenger::Request Mailbox::receive(void* data, std::size_t capacity, int source, int tag) {
  Record* const record = new_record();
  record->receives = true;
  record->is_waited_for = waited_for();
  record->peer = source;
  record->tag = tag;
  record->into = static_cast<std::byte*>(data);
  record->nbytes = capacity;
  const auto met =
      std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& a) { return matches(*record, a); });
  if (met == arrived_.end()) {
    posted_.push_back(record);
  } else {
    const Arrived arrived = std::move(*met);
    arrived_.erase(met);
    deliver(*record, arrived, arrived.bytes.data());
  }
  return {reinterpret_cast<std::uintptr_t>(record), true};
}

// ---- requests

bool Mailbox::test(Request& request, Envelope* envelope) {
  if (!request.active) return true;
  auto* const record = reinterpret_cast<Record*>(request.bits);
  if (!record->ended) advance();
  constexpr int kPatience = 2000;  // a tenth of a millisecond and more
  if (record->in_pieces && ++record->idle_tests > kPatience && host_->reaches_memory()) pull_rest(*record);
  if (!record->ended) return false;
  if (envelope != nullptr) *envelope = record->envelope;
  request.active = false;
  drop(record);
  return true;
}

bool Mailbox::cancel(Request& request) {
  if (!request.active) return false;
  auto* const record = reinterpret_cast<Record*>(request.bits);
  if (std::erase(posted_, record) == 0) return false;
  request.active = false;
  drop(record);
  return true;
}

bool Mailbox::probe(int tag, Envelope& envelope) {
  advance();
  for (const Arrived& arrived : arrived_) {
    if (arrived.tag != tag) continue;
    envelope = {arrived.source, arrived.tag};
    return true;
  }
  return false;
}

std::vector<Messenger::Loss> Mailbox::losses() {
  std::vector<Loss> found;
  const bool some_left = arena_->n_left().load(std::memory_order_acquire) != 0;
  for (std::size_t peer = 0; peer < members_.size(); ++peer) {
    const int rank = static_cast<int>(peer);
    if (rank == rank_ || reported_[peer]) continue;
    // Its farewell may never come: a rank that has given up does not write what its ring has no room for.
    const std::uint64_t left = some_left ? arena_->left(rank).load(std::memory_order_acquire) : 0;
    if (left != 0) {
      found.push_back({rank, left - 1, arena_->last_words(rank)});
    } else if (host_->ended(members_[peer])) {
      found.push_back({rank, arena_->released(rank).load(std::memory_order_acquire), "its process has ended"});
    } else {
      continue;
    }
    reported_[peer] = true;
  }
  return found;
}

std::unique_ptr<Messenger> Mailbox::subset(std::span<const int>) {
  throw Error("a mailbox is made with its group");  // NodeCommunicator makes both
}

}  // namespace samestep
