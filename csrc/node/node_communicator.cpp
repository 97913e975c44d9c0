#include "node/node_communicator.h"

#include <algorithm>

#include "communicator/checks.h"
#include "exchange/short_reduction.h"
#include "exchange/waiting.h"
#include "node/line_meeting.h"
#include "node/mailbox.h"
#include "node/node_reduction.h"
#include "node/shared_heap.h"

namespace samestep {
namespace {

/// From this size on ranks announce where their buffers are, see NodeReduction.
constexpr std::size_t kPostedFrom = 1 << 10;
constexpr unsigned kPollsAtOnce = 400;

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
  const std::shared_ptr<SharedHeap> from = heap();
  auto* const data = from ? static_cast<std::byte*>(from->allocate(nbytes).data) : nullptr;
  if (data == nullptr) return nullptr;
  return {data, [from](std::byte* block) { from->free(block); }};
}

Communicator::WorkPtr NodeCommunicator::reduction(const Signature& signature, ConstBuffer in, Buffer out,
                                                  const Reduction& reduction, std::size_t nbytes) {
  if (in.nbytes() < kPostedFrom && ShortReduction::fits(shared_engine(), signature.verb, nbytes)) {
    return start<ShortReduction>(signature, in, out, reduction);
  }
  return start<NodeReduction>(signature, group_, in, out, reduction);
}

Communicator::WorkPtr NodeCommunicator::long_broadcast(const Signature& signature, Buffer buffer) {
  return send_to_all(signature, buffer);
}

Communicator::WorkPtr NodeCommunicator::all_reduce_now(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                       const Shape& shape) {
  Engine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  const std::uint64_t sequence = engine.next_sequence();
  const bool is_short = in.nbytes() < kPostedFrom;
  if (in.nbytes() + sizeof(NodeReduction::Posted) > engine.meeting().limit() || !engine.idle() ||
      !engine.meeting().has_room(sequence) || in.count == 0 || size() == 1) {
    return all_reduce(in, out, reduction, shape);
  }
  checks::on_host("allreduce", in);
  checks::same_dtype("allreduce", in, out);
  checks::has_count("allreduce", "out", out, in.count);
  require_reducible(in.dtype, reduction);
  if (reduction.op == ReduceOp::premul) return all_reduce(in, out, reduction, shape);

  const Signature signature{Verb::all_reduce, in.dtype, reduction.op, -1, shape};
  const std::uint64_t digest = signature.digest();
  Meeting& meeting = engine.meeting();
  if (is_short) {
    meeting.announce(sequence, digest, {static_cast<const std::byte*>(in.data), in.nbytes()});
  } else {
    NodeReduction::announce_all_reduce(engine, *group_, sequence, digest, in, out, reduction);
  }
  bool complete = false;
  Pause pause(engine.options().oversubscribed);
  for (unsigned i = 0; i < kPollsAtOnce && !(complete = meeting.complete(sequence)); ++i) pause.step();
  bool done = complete;
  for (int peer = 0; peer < size() && done; ++peer) {
    done = peer == rank() || meeting.header(sequence, peer).digest == digest;
  }
  if (done && is_short) {
    ShortReduction::reduce_all(meeting, sequence, rank(), size(), in, out, reduction);
  } else if (done) {
    done = NodeReduction::reduce_announced(engine, sequence, in, out, reduction.op);
  }
  if (done) {
    meeting.release(sequence);
    engine.pass();
    return nullptr;
  }
  std::shared_ptr<Collective> operation;
  if (is_short) {
    operation = start_later<ShortReduction>(signature, in, out, reduction);
  } else {
    operation = start_later<NodeReduction>(signature, group_, in, out, reduction);
  }
  engine.adopt(operation);
  return operation;
}

}  // namespace samestep
