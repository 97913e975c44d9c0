#include "shm/shm_transport.h"

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

/// Copies a payload out of the ring, whose lines are this rank's until it advances `read`.
void take(std::byte* to, const std::byte* from, std::size_t nbytes) {
  kernels::copy_and_own_lines(to, const_cast<std::byte*>(from), nbytes);
}

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<ShmRegion> region, std::shared_ptr<LocalPeers> peers,
                           std::vector<int> members, int rank)
    : region_(std::move(region)),
      peers_(std::move(peers)),
      members_(std::move(members)),
      rank_(rank),
      outgoing_(members_.size()),
      reported_(members_.size()) {}

ShmTransport::RequestState* ShmTransport::new_request() {
  auto record = std::make_unique<RequestState>();
  RequestState* const key = record.get();
  requests_.emplace(key, std::move(record));
  return key;
}

void ShmTransport::drop(RequestState* record) { requests_.erase(record); }

// ---- sending

bool ShmTransport::write(int dest, const Frame& frame, Bytes bytes, Bytes more) {
  ShmRegion::Ring& ring = region_->ring(rank_, dest);
  const std::size_t room = region_->ring_nbytes();
  // relaxed: only this rank writes it
  std::uint64_t written = ring.written.value.load(std::memory_order_relaxed);
  const std::uint64_t read = ring.read.value.load(std::memory_order_acquire);  // pairs with read() and consume()
  const std::size_t at = written % room;
  // A frame is contiguous, so that the receiver can use it in place. If it does not fit before the end of the ring,
  // padding fills the end.
  const std::size_t fill = at + frame.nbytes > room ? room - at : 0;
  if (written + fill + frame.nbytes - read > room) return false;
  if (fill != 0) {
    const Frame padding{static_cast<std::uint32_t>(fill), Kind::padding, 0, 0, 0, 0};
    std::memcpy(ring.bytes() + at, &padding, sizeof padding);
    written += fill;
  }
  std::byte* const slot = ring.bytes() + written % room;
  std::memcpy(slot, &frame, sizeof frame);
  kernels::copy(slot + sizeof frame, bytes.data(), bytes.size());
  kernels::copy(slot + sizeof frame + bytes.size(), more.data(), more.size());
  // One store publishes the padding, the frame and its bytes.
  ring.written.value.store(written + frame.nbytes, std::memory_order_release);  // pairs with read() and peek()
  region_->notify(rank_);
  if (frame.nbytes <= ShmRegion::kDemoteMaxBytes) {
    kernels::demote_lines(slot, frame.nbytes);
    kernels::demote_lines(&ring.written, sizeof ring.written);
  }
  return true;
}

void ShmTransport::post(int dest, const Outgoing& outgoing) {
  // Frames that wait are first, even if the ring has room for a short one now: messages of one sender must not overtake
  // each other.
  auto& queue = outgoing_[static_cast<std::size_t>(dest)];
  if (queue.empty() && write(dest, outgoing.frame, outgoing.bytes)) {
    return sent(outgoing);
  }
  queue.push_back(outgoing);
}

void ShmTransport::sent(const Outgoing& outgoing) {
  if (outgoing.request == nullptr) return;
  outgoing.request->ended = true;
  if (outgoing.frame.kind == Kind::data) rts_sent_.erase(outgoing.frame.id);
}

void ShmTransport::flush(int dest) {
  auto& queue = outgoing_[static_cast<std::size_t>(dest)];
  while (!queue.empty() && write(dest, queue.front().frame, queue.front().bytes)) {
    sent(queue.front());
    queue.pop_front();
  }
}

bool ShmTransport::is_eager(const void* data, std::size_t nbytes) const {
  constexpr std::size_t kCopied = 40 << 10;  // of shared memory, which the receiver can read in place
  if (nbytes > max_eager()) return false;
  return nbytes <= kCopied || (peers_->to_remote_address(data, nbytes) & LocalPeers::kSharedAddressBit) == 0;
}

Transport::Request ShmTransport::send(const void* data, std::size_t nbytes, int dest, int tag) {
  const auto* bytes = static_cast<const std::byte*>(data);
  RequestState* const record = new_request();
  record->from = bytes;
  record->nbytes = nbytes;
  record->peer = dest;
  const Request request{reinterpret_cast<std::uintptr_t>(record), true};
  if (dest == rank_) {
    add_unexpected({rank_, tag, nbytes, {}, 0, 0}, bytes);
    record->ended = true;
  } else if (is_eager(data, nbytes)) {
    const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + nbytes));
    post(dest, {{total, Kind::eager, tag, 0, nbytes, 0}, {bytes, nbytes}, record});
  } else {
    // The receiver reads the bytes from here, so the request completes only when its FIN arrives, or with the last data
    // frame.
    const std::uint32_t id = next_id_++;
    rts_sent_.emplace(id, record);
    post(dest, {{kAlign, Kind::rts, tag, id, nbytes, peers_->to_remote_address(data, nbytes)}, {}, nullptr});
  }
  return request;
}

bool ShmTransport::send_inline(Bytes head, Bytes body, int dest, int tag) {
  const std::size_t nbytes = head.size() + body.size();
  if (dest == rank_ || !is_eager(body.data(), nbytes) || !outgoing_[static_cast<std::size_t>(dest)].empty())
    return false;
  const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + nbytes));
  return write(dest, {total, Kind::eager, tag, 0, nbytes, 0}, head, body);
}

void ShmTransport::send_data(RequestState& record, std::uint32_t id) {
  constexpr std::size_t kFrames = 4, kMinFrame = 16 << 10;
  // In several frames, so that the receiver copies one out while the next one is copied in.
  const std::size_t max_payload = std::min(std::max(aligned(record.nbytes / kFrames), kMinFrame), max_eager());
  for (std::size_t at = 0; at < record.nbytes;) {
    const std::size_t length = std::min(max_payload, record.nbytes - at);
    const auto total = static_cast<std::uint32_t>(aligned(sizeof(Frame) + length));
    const bool last = at + length == record.nbytes;
    post(record.peer, {{total, Kind::data, 0, id, length, 0}, {record.from + at, length}, last ? &record : nullptr});
    at += length;
  }
}

// ---- receiving

void ShmTransport::add_unexpected(UnexpectedMessage arrived, const std::byte* bytes) {
  if (RequestState* const record = matcher_.match(arrived.source, arrived.tag); record != nullptr) {
    return deliver(*record, arrived, bytes);
  }
  // The place in the ring is used again, so a message that no receive has matched is copied. Of a long one only the
  // address is kept.
  if (arrived.address == 0) arrived.bytes.assign(bytes, bytes + arrived.length);
  matcher_.keep(std::move(arrived));
}

void ShmTransport::deliver(RequestState& record, const UnexpectedMessage& arrived, const std::byte* bytes) {
  if (arrived.length > record.nbytes) {
    throw Error(str("a message of ", arrived.length, " bytes from rank ", arrived.source, " meets a receive of ",
                    record.nbytes));
  }
  record.envelope = {arrived.source, arrived.tag};
  record.nbytes = arrived.length;
  if (arrived.address == 0) {
    if (arrived.source == rank_) {
      kernels::copy(record.into, bytes, arrived.length);  // the sender's memory may be read-only
    } else {
      take(record.into, bytes, arrived.length);
    }
    record.ended = true;
    return;
  }
  const int peer = members_[static_cast<std::size_t>(arrived.source)];
  if (const std::byte* here = peers_->map_peer_memory(peer, arrived.address, arrived.length); here != nullptr) {
    constexpr std::size_t kBuffers = 4;  // of two ranks that exchange long messages
    kernels::copy_auto(record.into, here, arrived.length, kBuffers * arrived.length);
  } else if (!fetch_rendezvous(record, arrived)) {
    return;
  }
  send_fin(arrived.source, arrived.id);
  record.ended = true;
}

void ShmTransport::send_fin(int source, std::uint32_t id) {
  post(source, {{kAlign, Kind::fin, 0, id, 0, 0}, {}, nullptr});
}

/// False if the bytes arrive later, or never.
bool ShmTransport::fetch_rendezvous(RequestState& record, const UnexpectedMessage& arrived) {
  const int source = members_[static_cast<std::size_t>(arrived.source)];
  if (peers_->has_cma() && peers_->read_peer(source, record.into, arrived.address, arrived.length)) return true;
  // CMA is refused, or the sender has ended; then failed_peers() reports it.
  in_data_phase_.emplace(std::pair(arrived.source, arrived.id), &record);
  post(arrived.source, {{kAlign, Kind::cts, 0, arrived.id, 0, 0}, {}, nullptr});
  return false;
}

void ShmTransport::receive_data(int source, const Frame& frame, const std::byte* bytes) {
  RequestState& record = *in_data_phase_.at({source, frame.id});
  const bool is_cancelled = record.into == nullptr;
  if (!is_cancelled) take(record.into + record.moved, bytes, frame.length);
  record.moved += frame.length;
  if (record.moved != record.nbytes) return;
  record.ended = true;
  in_data_phase_.erase({source, frame.id});
  if (is_cancelled) drop(&record);
}

void ShmTransport::handle_frame(int source, const Frame& frame, const std::byte* bytes) {
  switch (frame.kind) {
    case Kind::padding:
      return;
    case Kind::eager:
      return add_unexpected({source, frame.tag, frame.length, {}, 0, 0}, bytes);
    case Kind::rts:
      return add_unexpected({source, frame.tag, frame.length, {}, frame.id, frame.address}, nullptr);
    case Kind::cts:
      return send_data(*rts_sent_.at(frame.id), frame.id);
    case Kind::fin:
      return complete_rts(frame.id);
    case Kind::data:
      return receive_data(source, frame, bytes);
  }
}

void ShmTransport::complete_rts(std::uint32_t id) {
  rts_sent_.at(id)->ended = true;
  rts_sent_.erase(id);
}

void ShmTransport::read(int source) {
  ShmRegion::Ring& ring = region_->ring(source, rank_);
  std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);  // relaxed: only this rank writes it
  while (read != ring.written.value.load(std::memory_order_acquire)) {   // pairs with write()
    const std::byte* const slot = ring.bytes() + read % region_->ring_nbytes();
    Frame frame;
    std::memcpy(&frame, slot, sizeof frame);
    // `read` is published after the frame has been used: the sender then writes over it.
    read += frame.nbytes;
    try {
      handle_frame(source, frame, slot + sizeof frame);
    } catch (...) {                                            // only this message is lost: the ring stays in order
      ring.read.value.store(read, std::memory_order_release);  // pairs with write()
      throw;
    }
    ring.read.value.store(read, std::memory_order_release);  // pairs with write()
    region_->notify(rank_);
  }
}

ShmTransport::Bytes ShmTransport::peek(int source, int tag) {
  // A message that has been kept may match the receive, and came before those in the ring.
  if (source == rank_ || matcher_.has_unexpected()) return {};
  ShmRegion::Ring& ring = region_->ring(source, rank_);
  const std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);  // relaxed: only this rank writes it
  if (read == ring.written.value.load(std::memory_order_acquire)) return {};   // pairs with write()
  const std::byte* const slot = ring.bytes() + read % region_->ring_nbytes();
  Frame frame;
  std::memcpy(&frame, slot, sizeof frame);
  if (frame.kind == Kind::padding) {
    consume(source);
    return peek(source, tag);
  }
  if (frame.kind != Kind::eager || frame.tag != tag) return {};
  return {slot + sizeof frame, frame.length};
}

void ShmTransport::consume(int source) {
  ShmRegion::Ring& ring = region_->ring(source, rank_);
  const std::uint64_t read = ring.read.value.load(std::memory_order_relaxed);  // relaxed: only this rank writes it
  Frame frame;
  std::memcpy(&frame, ring.bytes() + read % region_->ring_nbytes(), sizeof frame);
  ring.read.value.store(read + frame.nbytes, std::memory_order_release);  // pairs with write()
  region_->notify(rank_);
}

void ShmTransport::advance() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    read(peer);
    flush(peer);
  }
}

Transport::Request ShmTransport::receive(void* data, std::size_t capacity, int source, int tag) {
  RequestState* const record = new_request();
  record->receives = true;
  record->peer = source;
  record->tag = tag;
  record->into = static_cast<std::byte*>(data);
  record->nbytes = capacity;
  UnexpectedMessage* const found = matcher_.find(source, tag);
  if (found == nullptr) {
    matcher_.post(source, tag, record);
  } else {
    const UnexpectedMessage arrived = std::move(*found);
    matcher_.drop(found);
    deliver(*record, arrived, arrived.bytes.data());
  }
  return {reinterpret_cast<std::uintptr_t>(record), true};
}

// ---- requests

bool ShmTransport::test(Request& request, Envelope* envelope) {
  if (!request.active) return true;
  auto* const record = reinterpret_cast<RequestState*>(request.bits);
  // Every test reads all rings: peers may wait for room in one of them while this rank waits for another peer.
  if (!record->ended) advance();
  if (!record->ended) return false;
  if (envelope != nullptr) *envelope = record->envelope;
  request.active = false;
  drop(record);
  return true;
}

bool ShmTransport::cancel(Request& request) {
  if (!request.active) return false;
  auto* const record = reinterpret_cast<RequestState*>(request.bits);
  if (!record->receives || record->ended) return false;
  request.active = false;
  if (matcher_.withdraw(record)) {
    drop(record);
  } else {
    record->into = nullptr;  // its message is arriving: the remaining bytes are discarded
  }
  return true;
}

void ShmTransport::close() {
  // What is left here points to memory of callers, which they now get back.
  for (auto& queue : outgoing_) queue.clear();
  rts_sent_.clear();
  in_data_phase_.clear();
  matcher_ = {};
  requests_.clear();
}

bool ShmTransport::probe(int tag, Envelope& envelope) {
  advance();
  const UnexpectedMessage* const arrived = matcher_.find(kAnySource, tag);
  if (arrived == nullptr) return false;
  envelope = {arrived->source, arrived->tag};
  return true;
}

std::vector<Transport::PeerFailure> ShmTransport::failed_peers() {
  std::vector<PeerFailure> found;
  for (std::size_t peer = 0; peer < members_.size(); ++peer) {
    const int rank = static_cast<int>(peer);
    if (rank == rank_ || reported_[peer]) continue;
    // First the process, then the report: a rank that leaves and then ends has stored its report before.
    const bool ended = peers_->ended(members_[peer]);
    // Its LeaveNotice may never arrive: a rank that has left does not write the frames for which its ring had no room.
    // The count is read first: operations check only the count, and must not continue after this rank has seen that
    // another one has left.
    const bool some_left = region_->n_left().load(std::memory_order_acquire) != 0;  // pairs with the addition in leave
    // pairs with ShmHeaderExchange::leave, which publishes the report
    const std::uint64_t left = some_left ? region_->left(rank).load(std::memory_order_acquire) : 0;
    if (left != 0) {
      Departure why;
      std::memcpy(&why, region_->leave_reason(rank), sizeof why);
      why.text.back() = '\0';
      found.push_back({rank, left - 1, {}, why});
    } else if (ended) {
      // pairs with ShmHeaderExchange::release
      found.push_back({rank, region_->released(rank).load(std::memory_order_acquire), "its process has ended"});
    } else {
      continue;
    }
    reported_[peer] = true;
  }
  return found;
}

std::unique_ptr<Transport> ShmTransport::subset(std::span<const int>, std::uint32_t) {
  throw Error("internal: ShmTransport::subset is not supported");  // NodeCommunicator makes groups
}

}  // namespace samestep
