#include "node/node_communicator.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "collectives/one_shot_reduction.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "node/inline_collective.h"
#include "node/node_reduction.h"
#include "os/this_cpu.h"
#include "shm/shm_header_exchange.h"
#include "shm/shm_transport.h"
#include "transport/tags.h"
#include "waiting/backoff.h"

namespace samestep {
namespace {

/// Polls of the fast path before the call becomes an operation in the queue, which costs a microsecond. With a CPU for
/// each rank they take about 20 us; with fewer, each may be a yield.
unsigned polls_inline(const ProgressEngine& engine) { return engine.options().oversubscribed ? 200 : 4000; }

/// Waits a short time for all ranks to post the operation. True once they have.
bool wait_for_headers(const ProgressEngine& engine, ShmHeaderExchange& header_exchange, std::uint64_t sequence,
                      std::size_t nbytes) {
  constexpr int kPollsPerYield = 128;  // longer than other ranks take to switch on their CPU and post
  const bool oversubscribed = engine.options().oversubscribed;
  // Ranks in a loop of calls arrive at the same time. A poll that is too early fetches the line from its writer, which
  // then has to fetch it back.
  if (!oversubscribed && nbytes <= ShmRegion::kDemoteMaxBytes) spin_for_line_transfer();
  const unsigned polls = polls_inline(engine);
  Backoff pause = Backoff::for_fast_path(oversubscribed);
  for (unsigned i = 0; i < polls; ++i) {
    if (header_exchange.complete(sequence)) return true;
    // If the missing ranks run on other CPUs, a yield does not help them, and costs this rank its time slice.
    for (int k = 0; oversubscribed && k < kPollsPerYield && !header_exchange.shares_cpu_with_missing(sequence); ++k) {
      spin_for_line_transfer();
      if (header_exchange.complete(sequence)) return true;
    }
    if (pause.step()) return false;
  }
  return false;
}

}  // namespace

std::shared_ptr<NodeCommunicator> NodeCommunicator::open(std::shared_ptr<LocalPeers> host, std::vector<int> members,
                                                         ExchangeOptions options, const Deadline& deadline,
                                                         std::uint64_t number) {
  auto memory = host->share(members, ShmRegion::nbytes_for(static_cast<int>(members.size())), number, deadline);
  return open_in(std::move(memory), std::move(host), std::move(members), std::move(options), number);
}

std::shared_ptr<NodeCommunicator> NodeCommunicator::open_in(std::shared_ptr<std::byte> memory,
                                                            std::shared_ptr<LocalPeers> host, std::vector<int> members,
                                                            ExchangeOptions options, std::uint64_t number) {
  const int size = static_cast<int>(members.size());
  const auto me = std::find(members.begin(), members.end(), host->rank());
  auto group = std::make_shared<NodeGroup>();
  group->rank = static_cast<int>(me - members.begin());
  group->numbers = GroupNumbers(number);
  group->region = std::make_shared<ShmRegion>(std::move(memory), size);
  group->peers = std::move(host);
  group->members = std::move(members);
  group->fence = std::make_shared<WriteFence>(group->peers, group->members, static_cast<std::size_t>(group->rank),
                                              group->region->fence_words());
  // The engine owns the transport and the header exchange. The group keeps plain pointers to both, for what only ranks
  // of one host can do with them.
  auto header_exchange = std::make_unique<ShmHeaderExchange>(group->region, group->rank);
  group->header_exchange = header_exchange.get();
  auto transport = std::make_unique<ShmTransport>(group->region, group->peers, group->members, group->rank);
  group->transport = transport.get();
  auto engine = std::make_shared<ProgressEngine>(std::move(transport), std::move(options), std::move(header_exchange));
  engine->set_on_leave([fence = group->fence](std::uint64_t) { fence->close(); });
  return std::make_shared<NodeCommunicator>(std::move(engine), std::move(group));
}

std::shared_ptr<Communicator> NodeCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                           const Deadline& deadline) {
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(group_->member(rank));
  std::unique_lock lock(shared_engine().mutex());
  const std::uint64_t number = group_->numbers.next(ranks);
  lock.unlock();
  return open(group_->peers, std::move(members), std::move(options), deadline, number);
}

std::shared_ptr<NodeCommunicator> NodeCommunicator::open_beside(const std::vector<int>& ranks, const std::string& name,
                                                                const Deadline& deadline) {
  std::vector<int> members;
  for (const int rank : ranks) {
    checks::peer_in_group("group", "rank", rank, size());
    members.push_back(group_->member(rank));
  }
  const int n = static_cast<int>(members.size());
  const auto rank_of = [&](int member) { return std::ranges::find(members, member) - members.begin(); };
  ExchangeOptions options;
  options.name = name;
  options.oversubscribed = oversubscribed();
  while (true) {
    std::unique_lock lock(shared_engine().mutex());
    const std::uint64_t number = group_->beside.next(ranks);
    lock.unlock();
    LocalPeers::Meeting met = group_->peers->meet(members, ShmRegion::nbytes_for(n), number, deadline);
    if (met.memory) return open_in(std::move(met.memory), group_->peers, members, options, number);
    if (met.absent.empty()) continue;
    NamedRanks absent;
    std::string text = met.absent.size() == 1 ? "rank" : "ranks";
    for (const int member : met.absent) {
      text += str(absent.ranks.empty() ? " " : ", ", rank_of(member));
      absent.ranks.push_back(static_cast<int>(rank_of(member)));
    }
    text += str(" of ", n, " did not join group '", name, "' within ", deadline.timeout().count(), " s; rank ",
                rank_of(group_->peers->rank()), " waits no longer");
    throw TimeoutError(text, std::move(absent));
  }
}

Communicator::WorkPtr NodeCommunicator::start_collective(const CollectiveArgs& args) {
  if (InlineCollective::fits(shared_engine(), args) && !InlineCollective::posts_descriptor(args)) {
    return start_operation<InlineCollective>(args, group_);
  }
  return ExchangeCommunicator::start_collective(args);
}

Communicator::WorkPtr NodeCommunicator::start_reduction(const CollectiveArgs& args) {
  if (args.in.nbytes() < Thresholds::kDescriptorMin && !InlineCollective::posts_descriptor(args) &&
      OneShotReduction::fits(shared_engine(), args.type, nbytes_to_peer(args))) {
    return start_operation<OneShotReduction>(args);
  }
  return start_operation<NodeReduction>(args, group_);
}

Communicator::WorkPtr NodeCommunicator::run_collective(const CollectiveArgs& args) {
  ProgressEngine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  const std::uint64_t sequence = engine.next_sequence();
  HeaderExchange& header_exchange = engine.header_exchange();
  // The mutex is held from here to the release, so that no other thread starts an operation with this sequence number.
  if (size() == 1 || !engine.is_idle() || !header_exchange.can_post(sequence)) return start_collective(args);
  if (!InlineCollective::fits(engine, args)) return start_inline(args);
  const std::uint64_t digest = args.digest();
  // With a CPU for each rank the number is of no use: see `wait_for_headers`.
  group_->header_exchange->set_cpu(engine.options().oversubscribed ? this_cpu() : -1);
  InlineCollective::post(engine, *group_, sequence, digest, args);
  const bool all_posted = wait_for_headers(engine, *group_->header_exchange, sequence, args.out.nbytes());
  const bool agreed = all_posted && Collective::headers_agree(engine, sequence, digest);
  if (agreed && InlineCollective::finish(engine, sequence, args)) {
    header_exchange.release(sequence);
    engine.complete_inline();
    return nullptr;
  }
  // The header cannot be taken back. The operation in the queue takes it over, and finds the mismatch, if there is one.
  engine.adopt_posted_header();
  // If a rank is late, polling any longer would hold the mutex, and other groups and messages would not move.
  return all_posted ? start_inline(args) : start_collective(args);
}

Communicator::WorkPtr NodeCommunicator::start_inline(const CollectiveArgs& args) {
  // The mutex is held meanwhile, so longer collectives, and those for which peers are late, go to the queue.
  constexpr std::size_t kMaxBytes = 256 << 10;
  constexpr unsigned kShare = 4;  // of the polls of the fast path
  if (std::max(args.in.nbytes(), args.out.nbytes()) > kMaxBytes) return start_collective(args);
  shared_engine().poll_at_start(polls_inline(shared_engine()) / kShare);
  WorkPtr work = start_collective(args);
  // An operation that has failed is returned, so that the caller's wait throws its error.
  const auto& operation = static_cast<const Operation&>(*work);
  return operation.finished() && !operation.error() ? nullptr : work;
}

Communicator::WorkPtr NodeCommunicator::run_send(const SendArgs& args) {
  ProgressEngine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  // Straight into the ring of the receiver, without a request and without an entry in the queue.
  if (engine.can_send_inline()) {
    const ConstBuffer& in = args.in;
    const MessageHeader header{in.count, MessageHeader::kind_of(in.dtype, args.is_object), kInlineBody, args.tag};
    const ShmTransport::Bytes head(reinterpret_cast<const std::byte*>(&header), sizeof header);
    if (group_->transport->send_inline(head, {static_cast<const std::byte*>(in.data), in.nbytes()}, args.dest,
                                       tags::kUserMessage)) {
      engine.count_message(in.nbytes());
      engine.complete_message_inline();
      return nullptr;
    }
  }
  return start_operation<Send>(args);
}

NodeCommunicator::MatchResult NodeCommunicator::try_receive(const RecvArgs& args, int source, Status& status) {
  const ShmTransport::Bytes message = group_->transport->peek(source, tags::kUserMessage);
  if (message.empty()) return MatchResult::none;
  MessageHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  // A message with another tag, a long one, or one that does not fit is left to the inbox, which keeps it or describes
  // the mismatch.
  const bool wanted =
      (args.tag == kAnyTag || args.tag == header.tag) && header.body == kInlineBody && header.fits(args.out, args.fit);
  if (!wanted) return MatchResult::other;
  if (header.count != 0) {  // the lines are this rank's until `consume`
    kernels::copy_and_own_lines(args.out.data, const_cast<std::byte*>(message.data()) + sizeof header, header.nbytes());
  }
  group_->transport->consume(source);
  status = {source, header.tag, header.count};
  return MatchResult::taken;
}

Communicator::WorkPtr NodeCommunicator::run_recv(const RecvArgs& args, Status& status) {
  ProgressEngine& engine = shared_engine();
  const std::lock_guard lock(engine.mutex());
  const bool only_elements = args.fit == Fit::up_to || args.fit == Fit::exactly;
  if (!only_elements) return start_recv(args);
  // A receive that is posted, or a message that the inbox has kept, comes first.
  if (!engine.can_receive_inline()) return start_operation<Receive>(args);
  const bool any = args.source == kAnySource;
  Backoff pause = Backoff::for_fast_path(engine.options().oversubscribed);
  MatchResult met = MatchResult::none;
  const unsigned polls = polls_inline(engine);
  for (unsigned i = 0; i < polls && met == MatchResult::none; ++i) {
    for (int peer = any ? 0 : args.source; peer < (any ? size() : args.source + 1) && met == MatchResult::none;
         ++peer) {
      met = try_receive(args, peer, status);
    }
    if (met == MatchResult::none && pause.step()) break;
  }
  if (met != MatchResult::taken) return start_operation<Receive>(args);
  engine.complete_message_inline();
  return nullptr;
}

Communicator::WorkPtr NodeCommunicator::run_sendrecv(const SendArgs& sent, const RecvArgs& received, Status& status,
                                                     WorkPtr& sending) {
  // Locked once for both: locking again would wait until the sent data are visible to other CPUs.
  const std::lock_guard lock(shared_engine().mutex());
  return ExchangeCommunicator::run_sendrecv(sent, received, status, sending);
}

}  // namespace samestep
