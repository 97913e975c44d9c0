#include "node/node_communicator.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "exchange/short_reduction.h"
#include "exchange/tags.h"
#include "exchange/waiting.h"
#include "kernels/stream.h"
#include "node/line_meeting.h"
#include "node/mailbox.h"
#include "node/node_reduction.h"
#include "node/shared_heap.h"
#include "node/short_call.h"
#include "os/cpu_set.h"

namespace samestep {
namespace {

/// Polls before a call that waits at once becomes an operation in the queue, which costs a microsecond: with a CPU for
/// each rank some 20 us, else as often as giving way is cheap.
unsigned polls_at_once(const Engine& engine) { return engine.options().oversubscribed ? 200 : 4000; }

/// Waits some time for all ranks to announce it. True once they have.
bool meet(const Engine& engine, LineMeeting& meeting, std::uint64_t sequence, std::size_t nbytes) {
  constexpr int kLooksPerTurn = 128;  // together longer than the others take to change places and announce it
  const bool oversubscribed = engine.options().oversubscribed;
  // Ranks that call in a row come at the same time. Who looks too soon takes the line from its writer, who then has to
  // take it back.
  if (!oversubscribed && nbytes <= Arena::kReadSoonest) pause_for_a_line();
  const unsigned polls = polls_at_once(engine);
  Pause pause = Pause::of_who_leaves(oversubscribed);
  for (unsigned i = 0; i < polls; ++i) {
    if (meeting.complete(sequence)) return true;
    // Who is missing may be running on another CPU. Then to give way helps nobody, and costs the turn in which this
    // rank would have gone on.
    for (int k = 0; oversubscribed && k < kLooksPerTurn && !meeting.keeps_others_from(sequence); ++k) {
      pause_for_a_line();
      if (meeting.complete(sequence)) return true;
    }
    if (pause.step()) return false;
  }
  return false;
}

}  // namespace

std::shared_ptr<NodeCommunicator> NodeCommunicator::open(std::shared_ptr<Host> host, std::vector<int> members,
                                                         ExchangeOptions options, const Deadline& deadline) {
  const int size = static_cast<int>(members.size());
  const auto me = std::find(members.begin(), members.end(), host->rank());
  auto group = std::make_shared<NodeGroup>();
  group->rank = static_cast<int>(me - members.begin());
  group->arena = std::make_shared<Arena>(host->share(members, Arena::nbytes_for(size), deadline), size);
  group->host = std::move(host);
  group->members = std::move(members);
  auto meeting = std::make_unique<LineMeeting>(group->arena, group->rank);
  group->meeting = meeting.get();
  auto mailbox = std::make_unique<Mailbox>(group->arena, group->host, group->members, group->rank);
  group->mailbox = mailbox.get();
  auto engine = std::make_shared<Engine>(std::move(mailbox), std::move(options), std::move(meeting));
  return std::make_shared<NodeCommunicator>(std::move(engine), std::move(group));
}

std::shared_ptr<Communicator> NodeCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                           const Deadline& deadline) {
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(group_->member(rank));
  return open(group_->host, std::move(members), std::move(options), deadline);
}

std::shared_ptr<std::byte> NodeCommunicator::allocate_shared(std::size_t nbytes) {
  return samestep::allocate_shared(heap(), nbytes);
}

Communicator::WorkPtr NodeCommunicator::reduction(const Signature& signature, ConstBuffer in, Buffer out,
                                                  const Reduction& reduction, std::size_t nbytes) {
  if (in.nbytes() < Crossings::kPostedFrom && ShortReduction::fits(shared_engine(), signature.verb, nbytes)) {
    return start<ShortReduction>(signature, in, out, reduction);
  }
  return start<NodeReduction>(signature, group_, in, out, reduction);
}

Communicator::WorkPtr NodeCommunicator::long_broadcast(const Signature& signature, Buffer buffer) {
  return send_to_all(signature, buffer);
}

Communicator::WorkPtr NodeCommunicator::now(const Call& call) {
  Engine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  const std::uint64_t sequence = engine.next_sequence();
  Meeting& meeting = engine.meeting();
  if (size() == 1 || !engine.idle() || !meeting.has_room(sequence)) return begin(call);
  if (!short_call::fits(engine, call)) return begin_at_once(call);
  checks::arguments(call, rank(), size());
  const std::uint64_t digest = call.digest();
  group_->meeting->runs_on(engine.options().oversubscribed ? this_cpu() : -1);
  short_call::announce(engine, *group_, sequence, digest, call);
  const bool met = meet(engine, *group_->meeting, sequence, call.out.nbytes());
  bool agreed = met;
  for (int peer = 0; peer < size() && agreed; ++peer) {
    agreed = peer == rank() || meeting.header(sequence, peer).digest == digest;
  }
  if (agreed && short_call::finish(engine, sequence, call)) {
    meeting.release(sequence);
    engine.pass();
    return nullptr;
  }
  engine.next_is_announced();
  return met ? begin_at_once(call) : begin(call);
}

Communicator::WorkPtr NodeCommunicator::begin_at_once(const Call& call) {
  // Longer ones, and those for which others are late, are not to keep other threads waiting.
  constexpr std::size_t kMost = 256 << 10;
  constexpr unsigned kShare = 4;
  if (std::max(call.in.nbytes(), call.out.nbytes()) > kMost) return begin(call);
  const Engine::AtOnce at_once(shared_engine(), polls_at_once(shared_engine()) / kShare);
  WorkPtr work = begin(call);
  const auto& operation = dynamic_cast<const Operation&>(*work);
  return operation.finished() && !operation.error() ? nullptr : work;
}

bool NodeCommunicator::pull(int peer, std::span<const Piece> pieces, bool taken) {
  const auto take = [taken](const Piece& piece, std::byte* there) {
    taken ? kernels::take_lines(piece.mine, there, piece.nbytes) : kernels::copy_lines(piece.mine, there, piece.nbytes);
  };
  return group_->host->pull(group_->member(peer), copy_shared(peer, pieces, take));
}

bool NodeCommunicator::push(int peer, std::span<const Piece> pieces) {
  const auto give = [](const Piece& piece, std::byte* there) { kernels::copy(there, piece.mine, piece.nbytes); };
  return group_->host->push(group_->member(peer), copy_shared(peer, pieces, give));
}

template <class Copy>
std::vector<Piece> NodeCommunicator::copy_shared(int peer, std::span<const Piece> pieces, const Copy& copy) {
  std::vector<Piece> others;
  for (const Piece& piece : pieces) {
    std::byte* const there = group_->host->at(group_->member(peer), piece.theirs, piece.nbytes);
    there == nullptr ? others.push_back(piece) : copy(piece, there);
  }
  return others;
}

Communicator::WorkPtr NodeCommunicator::send_now(const ConstBuffer& in, int dest, int tag) {
  Engine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  if (engine.sends_at_once() && in.device.kind == DeviceKind::cpu && tag >= 0 && dest >= 0 && dest < size()) {
    const MessageHeader header{in.count, static_cast<std::uint32_t>(in.dtype), kInlineBody, tag};
    const Mailbox::Bytes head(reinterpret_cast<const std::byte*>(&header), sizeof header);
    if (group_->mailbox->send_at_once(head, {static_cast<const std::byte*>(in.data), in.nbytes()}, dest,
                                      tags::kUserMessage)) {
      engine.count_message(in.nbytes());
      engine.pass_message();
      return nullptr;
    }
  }
  return start_send(in, dest, tag, true);
}

NodeCommunicator::Met NodeCommunicator::take_message(Buffer out, int source, int tag, Status& status) {
  const Mailbox::Bytes message = group_->mailbox->peek(source, tags::kUserMessage);
  if (message.empty()) return Met::none;
  MessageHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  const bool wanted = (tag == kAnyTag || tag == header.tag) && header.body == kInlineBody &&
                      header.count == out.count && static_cast<DType>(header.dtype) == out.dtype;
  if (!wanted) return Met::other;
  if (out.count != 0) {  // the lines are this rank's until it skips them
    kernels::take_lines(out.data, const_cast<std::byte*>(message.data()) + sizeof header, out.nbytes());
  }
  group_->mailbox->skip(source);
  status = {source, header.tag, header.count};
  return Met::taken;
}

Communicator::WorkPtr NodeCommunicator::recv_now(const Buffer& out, int source, int tag, Status& status) {
  Engine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  const bool any = source == kAnySource;
  if (!engine.receives_at_once() || out.device.kind != DeviceKind::cpu || (!any && (source < 0 || source >= size()))) {
    return start_recv(out, source, tag, true);
  }
  Pause pause = Pause::of_who_leaves(engine.options().oversubscribed);
  Met met = Met::none;
  const unsigned polls = polls_at_once(engine);
  for (unsigned i = 0; i < polls && met == Met::none; ++i) {
    for (int peer = any ? 0 : source; peer < (any ? size() : source + 1) && met == Met::none; ++peer) {
      met = take_message(out, peer, tag, status);
    }
    if (met == Met::none && pause.step()) break;
  }
  if (met != Met::taken) return start_recv(out, source, tag, true);
  engine.pass_message();
  return nullptr;
}

Communicator::WorkPtr NodeCommunicator::sendrecv_now(const ConstBuffer& in, int dest, const Buffer& out, int source,
                                                     Status& status, WorkPtr& sending) {
  // Once for both: to lock again would wait until others can see what was sent.
  const std::lock_guard lock(shared_engine().mutex());
  return Communicator::sendrecv_now(in, dest, out, source, status, sending);
}

}  // namespace samestep
