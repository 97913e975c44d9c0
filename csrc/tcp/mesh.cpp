#include "tcp/mesh.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "waiting/backoff.h"

namespace samestep::tcp {
namespace {

constexpr Seconds kListenEvery{0.25};
constexpr Seconds kCloseWait{2};
constexpr std::chrono::milliseconds kActivityWait{1};
constexpr std::size_t kPolledFrom = 2;  // connections; a single one is polled by reading

}  // namespace

Mesh::Mesh(int rank, std::vector<TcpPeer> peers) : rank_(rank), index_(peers.size()), incoming_(peers.size()) {
  const std::string here = str("rank ", rank_, " at ", peers[static_cast<std::size_t>(rank)].where);
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    peers_.push_back(peers[peer].where);
    if (static_cast<int>(peer) == rank_) continue;
    index_[peer] = connections_.size();
    connections_.emplace_back(static_cast<int>(peer), std::move(peers[peer]), here);
    poller_.add(connections_.back().fd(), index_[peer]);
  }
  noted_failures_.resize(connections_.size());
}

// Made at the first use, which may be a frame that arrives before this rank has opened the group.
Mesh::GroupState& Mesh::state(Group group) { return groups_.try_emplace(group, size()).first->second; }

void Mesh::open(Group group, std::vector<int> members) {
  const std::lock_guard lock(mutex_);
  GroupState& opened = state(group);
  opened.members = std::move(members);
  opened.is_open = true;
  ++n_open_;
}

// ---- progress

void Mesh::advance() {
  if (connections_.size() < kPolledFrom) {
    // A read that finds nothing costs no more than asking the poller, and saves the second call if there is something.
    for (Connection& connection : connections_) {
      connection.ready(true, !connection.all_sent(), false);
      connection.advance(*this);
    }
  } else {
    advance_all();
  }
  note_failures();
}

void Mesh::advance_all() {
  std::array<Poller::Event, 64> room;
  for (const Poller::Event& event : poller_.poll(room)) {
    connections_[event.number].ready(event.readable, event.writable, event.hung_up);
  }
  for (Connection& connection : connections_) connection.advance(*this);
}

void Mesh::note_failures() {
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    if (!connections_[i].lost() || noted_failures_[i]) continue;
    noted_failures_[i] = true;
    const int peer = connections_[i].peer();
    // Messages of which a part is missing can never complete, so that no receive may match them any more.
    incoming_[static_cast<std::size_t>(peer)].clear();
    for (auto& [number, group] : groups_) group.matching.forget_incomplete(peer);
    erase_closed();
  }
}

void Mesh::detach_sends(Group group) {
  const std::lock_guard lock(mutex_);
  for (auto& [id, sent] : rts_sent_) sent.detached |= sent.group == group;
  for (Connection& connection : connections_) connection.detach_sends(group);
}

void Mesh::flush(int peer) {
  const std::lock_guard lock(mutex_);
  if (peer == rank_) return;
  const Clock::time_point begin = Clock::now();
  Backoff pause(/*oversubscribed=*/true);
  for (advance(); !to(peer).lost() && !to(peer).all_sent() && Clock::now() - begin < flush_left_; advance()) {
    pause.step();
  }
  flush_left_ -= Clock::now() - begin;
}

void Mesh::wait_for_activity() {
  int fd = poller_.fd();
  bool to_write = false;
  {
    const std::lock_guard lock(mutex_);
    for (const Connection& connection : connections_) {
      // The poller reports changes only. What is ready already, and was left because of a limit, would not end the
      // sleep.
      if (connection.has_work()) return;
    }
    if (connections_.size() < kPolledFrom && !connections_.empty()) {  // the events of a single connection are not used
      fd = connections_[0].fd();
      to_write = !connections_[0].all_sent();
    }
  }
  // Without the mutex: other threads make progress meanwhile.
  wait_until_ready(fd, to_write, kActivityWait);
}

// ---- receiving

Connection::Destination Mesh::destination_of(int peer, const Frame& frame) {
  if (frame.kind == Frame::Kind::data) {
    auto& incoming = incoming_[static_cast<std::size_t>(peer)];
    const auto found = incoming.find(frame.id);
    if (found == incoming.end() || found->second.request == nullptr) return {};
    if (frame.nbytes > found->second.left) return {};  // no rank sends more than its RTS said
    RequestState* const record = found->second.request;
    return {record->into + record->moved, record, nullptr};
  }
  if (frame.kind != Frame::Kind::eager) return {};
  GroupState& group = state(frame.group);
  // No destination: the bytes are read and discarded, because the frames behind them belong to other groups.
  if (group.is_closed) return {};
  if (RequestState* const record = group.matching.match(peer, frame.tag); record != nullptr) {
    record->envelope = {peer, frame.tag};
    if (frame.nbytes > record->nbytes) {
      record->too_long = frame.nbytes;
      return {nullptr, record, nullptr};
    }
    record->nbytes = frame.nbytes;
    return {record->into, record, nullptr};
  }
  UnexpectedMessage& kept =
      group.matching.keep({peer, frame.tag, frame.nbytes, std::make_unique_for_overwrite<std::byte[]>(frame.nbytes)});
  return {kept.bytes.get(), nullptr, &kept};
}

void Mesh::take(int peer, const Frame& frame, const Connection::Destination& place) {
  switch (frame.kind) {
    case Frame::Kind::eager:
      return handle_eager(frame, place);
    case Frame::Kind::rts:
      return handle_rts(peer, frame);
    case Frame::Kind::cts:
      // None if the group has been closed here since: then the memory belongs to the caller again.
      if (const auto found = rts_sent_.find(frame.id); found != rts_sent_.end()) {
        const RtsSent sent = found->second;
        rts_sent_.erase(found);
        to(peer).send_data(sent.request, frame.group, frame.id, sent.detached);
      }
      return;
    case Frame::Kind::data:
      return handle_data(peer, frame);
    case Frame::Kind::leave:
      state(frame.group).left[static_cast<std::size_t>(peer)] = true;
      return erase_closed();
    case Frame::Kind::damage:
      to(peer).end_damaged(/*sent=*/true);
  }
}

void Mesh::handle_eager(const Frame& frame, const Connection::Destination& place) {
  if (place.request != nullptr) place.request->ended = true;
  if (place.unexpected == nullptr) return;
  place.unexpected->complete = true;
  // The receive was posted while the bytes were arriving, and could not redirect them.
  RequestState* const taker = place.unexpected->taker;
  if (taker == nullptr) return;
  if (taker->into != nullptr) kernels::copy(taker->into, place.unexpected->bytes.get(), frame.nbytes);
  taker->ended = true;
  state(frame.group).matching.drop(place.unexpected);
}

void Mesh::handle_rts(int peer, const Frame& frame) {
  GroupState& group = state(frame.group);
  if (group.is_closed) return;
  if (RequestState* const record = group.matching.match(peer, frame.tag); record != nullptr) {
    request_data(frame, peer, *record);
  } else {
    group.matching.keep({peer, frame.tag, frame.nbytes, nullptr, frame.id, /*offered=*/true});
  }
}

void Mesh::request_data(const Frame& offer, int source, RequestState& record) {
  record.envelope = {source, offer.tag};
  const bool fits = offer.nbytes <= record.nbytes;
  if (fits) {
    record.nbytes = offer.nbytes;
  } else {
    record.too_long = offer.nbytes;
    record.ended = true;
  }
  // The data of a message that is too long are requested, too, and discarded: its sender cannot know, and would wait.
  incoming_[static_cast<std::size_t>(source)].emplace(offer.id,
                                                      Incoming{fits ? &record : nullptr, offer.group, offer.nbytes});
  to(source).send({offer.group, 0, 0, Frame::Kind::cts, 0, offer.id});
}

void Mesh::handle_data(int peer, const Frame& frame) {
  auto& incoming = incoming_[static_cast<std::size_t>(peer)];
  const auto found = incoming.find(frame.id);
  if (found == incoming.end()) return;
  RequestState* const record = found->second.request;
  if (record != nullptr) record->moved += frame.nbytes;
  found->second.left -= std::min<std::size_t>(found->second.left, frame.nbytes);
  if (found->second.left > 0) return;
  if (record != nullptr) record->ended = true;
  incoming.erase(found);
}

// ---- requests

void Mesh::send_to_self(Group group, Bytes bytes, int tag) {
  Matcher& matching = state(group).matching;
  RequestState* const receive = matching.match(rank_, tag);
  std::byte* into = nullptr;
  if (receive == nullptr) {
    UnexpectedMessage& kept = matching.keep(
        {rank_, tag, bytes.size(), std::make_unique_for_overwrite<std::byte[]>(bytes.size()), 0, false, true});
    into = kept.bytes.get();
  } else {
    receive->envelope = {rank_, tag};
    receive->ended = true;
    const bool fits = bytes.size() <= receive->nbytes;
    (fits ? receive->nbytes : receive->too_long) = bytes.size();
    if (fits) into = receive->into;
  }
  if (into != nullptr) kernels::copy(into, bytes.data(), bytes.size());
}

RequestState* Mesh::send(Group group, Bytes bytes, int dest, int tag) {
  const std::lock_guard lock(mutex_);
  RequestState* const record = state(group).matching.new_request();
  record->from = bytes.data();
  record->nbytes = bytes.size();
  record->peer = dest;
  if (dest == rank_) {
    send_to_self(group, bytes, tag);
    record->ended = true;
  } else if (bytes.size() <= kEagerLimit) {
    to(dest).send({group, bytes.size(), 0, Frame::Kind::eager, tag, 0}, bytes, record);
  } else {
    const std::uint32_t id = next_id_++;
    rts_sent_.emplace(id, RtsSent{record, group});
    to(dest).send({group, bytes.size(), 0, Frame::Kind::rts, tag, id});
  }
  return record;
}

RequestState* Mesh::receive(Group group, void* data, std::size_t room, int source, int tag) {
  const std::lock_guard lock(mutex_);
  Matcher& matching = state(group).matching;
  RequestState* const record = matching.new_request();
  record->into = static_cast<std::byte*>(data);
  record->nbytes = room;
  record->peer = source;
  record->tag = tag;
  UnexpectedMessage* const arrived = matching.find_unexpected(*record);
  if (arrived == nullptr) {
    matching.post(source, tag, record);
    return record;
  }
  if (arrived->offered) {
    request_data({group, arrived->nbytes, 0, Frame::Kind::rts, tag, arrived->id}, arrived->source, *record);
    matching.drop(arrived);
    return record;
  }
  record->envelope = {arrived->source, tag};
  const bool fits = arrived->nbytes <= room;
  (fits ? record->nbytes : record->too_long) = arrived->nbytes;
  if (!fits) record->into = nullptr;
  // The remaining bytes still arrive in the memory of the message; `handle_eager` copies them then.
  if (!arrived->complete) {
    arrived->taker = record;
    return record;
  }
  if (fits) kernels::copy(data, arrived->bytes.get(), arrived->nbytes);
  record->ended = true;
  matching.drop(arrived);
  return record;
}

bool Mesh::test(Group group, RequestState* record, Transport::Envelope& met) {
  const std::lock_guard lock(mutex_);
  if (!record->ended) advance();
  if (!record->ended) return false;
  met = record->envelope;
  const RequestState ended = *record;
  state(group).matching.recycle(record);
  if (ended.too_long > 0) {
    throw Error(str("a message of ", ended.too_long, " bytes from ", peers_[static_cast<std::size_t>(met.source)],
                    " meets a receive of ", ended.nbytes));
  }
  return true;
}

bool Mesh::cancel(Group group, RequestState* record) {
  const std::lock_guard lock(mutex_);
  if (record->ended) return false;
  Matcher& matching = state(group).matching;
  if (!matching.withdraw(record) && record->envelope.source >= 0) {
    // Its message is being received: the remaining bytes are discarded.
    to(record->envelope.source).forget_destination(record);
    for (auto& [id, incoming] : incoming_[static_cast<std::size_t>(record->envelope.source)]) {
      if (incoming.request == record) incoming.request = nullptr;
    }
    matching.orphan(record);
  }
  matching.recycle(record);
  return true;
}

bool Mesh::probe(Group group, int tag, Transport::Envelope& from) {
  const std::lock_guard lock(mutex_);
  advance();
  const UnexpectedMessage* const found = state(group).matching.find_complete(tag);
  if (found == nullptr) return false;
  from = {found->source, tag};
  return true;
}

std::string Mesh::failure(Group group, int peer) {
  const std::lock_guard lock(mutex_);
  if (const Clock::time_point now = Clock::now(); now - last_listened_ > kListenEvery) {
    // Not at each call: this is a system call for each connection.
    last_listened_ = now;
    for (Connection& connection : connections_) connection.check_heartbeat();
    advance();
  }
  // A peer that has closed the group before is free to close its connections.
  if (peer == rank_ || !to(peer).lost() || state(group).left[static_cast<std::size_t>(peer)]) return {};
  return to(peer).reason();
}

// ---- the end

void Mesh::close(Group group, Peers peers) {
  const std::lock_guard lock(mutex_);
  GroupState& closing = state(group);
  if (!closing.is_open) return;
  for (const int peer : closing.members) {
    if (peer != rank_) to(peer).send({group, 0, 0, Frame::Kind::leave, 0, 0});
  }
  // With its last group a rank closes its connections. Peers that have not closed the group yet would take that for a
  // failure, so this rank waits for them a little. Connections with other open groups stay.
  if (n_open_ == 1 && peers == Peers::close_too) wait_for_peers_to_close(closing);
  end(group, closing);
}

void Mesh::drop(Group group) {
  const std::lock_guard lock(mutex_);
  GroupState& dropped = state(group);
  end(group, dropped);
  dropped.matching = Matcher();
  dropped.is_dropped = true;
  erase_closed();
}

bool Mesh::has_closed(Group group, int peer) {
  const std::lock_guard lock(mutex_);
  return has_closed(state(group), peer);
}

bool Mesh::has_closed(const GroupState& group, int peer) {
  return peer == rank_ || group.left[static_cast<std::size_t>(peer)] || to(peer).lost();
}

bool Mesh::all_closed(const GroupState& group) {
  return std::all_of(group.members.begin(), group.members.end(), [&](int peer) { return has_closed(group, peer); });
}

void Mesh::wait_for_peers_to_close(const GroupState& group) {
  const Deadline deadline = Deadline::after(kCloseWait);
  const auto all_sent = [](const Connection& connection) { return connection.lost() || connection.all_sent(); };
  Backoff pause(/*oversubscribed=*/true);
  for (advance(); !all_closed(group) || !std::all_of(connections_.begin(), connections_.end(), all_sent); advance()) {
    if (pause.step() && deadline.passed()) return;
  }
}

void Mesh::end(Group group, GroupState& ending) {
  if (!ending.is_open) return;
  --n_open_;
  for (Connection& connection : connections_) {
    n_open_ > 0 ? connection.forget(group) : connection.end("all groups are closed here");
  }
  // A CTS that arrives later finds nothing to send, and data frames are discarded.
  std::erase_if(rts_sent_, [group](const auto& entry) { return entry.second.group == group; });
  for (auto& from_peer : incoming_) {
    for (auto& [id, incoming] : from_peer) {
      if (incoming.group == group) incoming.request = nullptr;
    }
  }
  ending.matching.forget_all();
  ending.is_open = false;
  ending.is_closed = true;
}

void Mesh::erase_closed() {
  // Until all members have closed the group, or are lost, frames for it may arrive, and `state` would make it anew as
  // one that is not closed.
  std::erase_if(groups_, [this](const auto& entry) { return entry.second.is_dropped && all_closed(entry.second); });
}

}  // namespace samestep::tcp
