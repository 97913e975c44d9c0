#include "engine/progress_engine.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "engine/bruck_header_exchange.h"
#include "engine/linear_header_exchange.h"
#include "engine/operation.h"
#include "process/wait_hooks.h"
#include "transport/tags.h"
#include "waiting/backoff.h"

namespace samestep {
namespace {

constexpr Seconds kPingAfter{1};  // of waiting: most late peers are merely late
constexpr Seconds kPingAgainAfter{0.25};
constexpr int kPingAllUpTo = 64;    // ranks; in a larger group the ranks that are waited for,
constexpr int kPingRoundRobin = 8;  // and so many others each time

// Set once, and never cleared. Nothing else is read by way of them, so their order does not matter.
std::atomic<bool> ranks_are_lost = false, ranks_have_left = false;

std::unique_ptr<HeaderExchange> make_message_header_exchange(Transport& transport, const ExchangeOptions& options) {
  if (transport.size() > options.bruck_above) {
    return std::make_unique<BruckHeaderExchange>(transport, options.inline_limit);
  }
  return std::make_unique<LinearHeaderExchange>(transport, options.inline_limit);
}

}  // namespace

ProgressEngine::ProgressEngine(std::unique_ptr<Transport> transport, ExchangeOptions options,
                               std::unique_ptr<HeaderExchange> header_exchange)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      options_(std::move(options)),
      inbox_(*transport_),
      header_exchange_(std::move(header_exchange)),
      departures_(options_, rank_, size_) {
  if (options_.family == nullptr) options_.family = std::make_shared<Family>();
  if (header_exchange_ == nullptr) header_exchange_ = make_message_header_exchange(*transport_, options_);
  // Made in advance, because a child after fork must not allocate memory.
  refusal_ = std::make_exception_ptr(NotInitializedError(str(
      "this process was forked from rank ", rank_, "; group '", name(), "' can only be used in the original process; ",
      "start more ranks with `samestep run`, mpirun or samestep.multiprocessing.spawn")));
  register_listener();
}

void ProgressEngine::apply(const GroupSettings& settings) {
  const std::lock_guard lock(mutex_);
  if (settings.naming) options_.naming = *settings.naming;
  if (settings.hosts) options_.hosts = *settings.hosts;
  if (settings.oversubscribed) options_.oversubscribed = *settings.oversubscribed;
  if (settings.message_segment) options_.message_segment = *settings.message_segment;
  if (settings.algorithm) options_.algorithm = parse_algorithm(*settings.algorithm);
  if (settings.segment_bytes) options_.segment_bytes = *settings.segment_bytes;
  if (settings.default_segment_bytes && options_.segment_bytes == 0) {
    options_.segment_bytes = *settings.default_segment_bytes;
  }
  if (settings.max_message.value_or(0) != 0) transport_->set_max_message(*settings.max_message);
  if (settings.copy_local) copy_local_ = settings.copy_local;
}

std::uint32_t ProgressEngine::next_body_id() {
  // Who sends 8192 messages during a long one would otherwise send one with its tag between two of its segments. As
  // many long ones at a time are more than there are tags.
  if (open_bodies_.size() < tags::kBodies) {
    while (open_bodies_.contains(tags::of_body(next_body_id_))) ++next_body_id_;
  }
  return next_body_id_++;
}

std::size_t ProgressEngine::segment_nbytes(std::size_t nbytes) const {
  const std::size_t most = options_.message_segment;
  if (most == 0 || nbytes <= most) return nbytes;
  // Of equal length, so that the last one, too, is longer than what transports send before it is received.
  const std::size_t n_segments = (nbytes + most - 1) / most;
  return (nbytes + n_segments - 1) / n_segments;
}

ProgressEngine::~ProgressEngine() { unregister_listener(); }

/// Other threads may have been in the middle of anything when the process was forked. So this only makes every use
/// throw, and neither allocates nor frees memory.
void ProgressEngine::after_fork_in_child() noexcept {
  std::construct_at(&mutex_);                // the thread that held it, if one did, does not exist here
  if (std::exchange(forked_, true)) return;  // in the parent already, which is a child itself
  broken_.swap(refusal_);
}

void ProgressEngine::advance() {
  const std::unique_lock alone(mutex_, std::try_to_lock);
  if (alone.owns_lock() && usable()) progress();
}

void ProgressEngine::require_usable() const {
  if (closed_) {
    throw NotInitializedError(
        str("group '", name(), "' is closed: make it again, or call samestep.initialize() to start anew"));
  }
  if (broken_) std::rethrow_exception(broken_);
}

void ProgressEngine::start(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  const unsigned polls = std::exchange(polls_at_start_, 0);
  require_usable();
  if (!std::exchange(registered_, true)) register_progress_source(weak_from_this());
  std::uint64_t sequence = 0;
  if (operation->is_collective()) {
    sequence = next_sequence_++;
    collectives_.push_back(operation);
  } else {
    ++point_to_point_started_;
    pending_messages_.push_back(operation);
  }
  // The fast path has posted the header already, and calls this with the mutex held since.
  if (operation->is_collective() && std::exchange(adopts_posted_header_, false)) {
    static_cast<Collective&>(*operation).begin_posted(sequence);
  } else {
    try {
      operation->begin(sequence);
    } catch (const std::exception&) {
      fail_alone(*operation, std::current_exception());
      leave_if_failed_alone();
      throw;
    }
  }
  const bool alone = collectives_.size() == 1 && collectives_.front() == operation;
  if (polls != 0 && alone) {
    poll_operation(*operation, polls);
  } else {
    progress();
  }
  fail_bereft();  // a rank that it needs may have left before
}

void ProgressEngine::advance(Operation& operation) {
  if (operation.finished()) return;
  try {
    if (operation.advance()) operation.finish();
  } catch (const MismatchError&) {  // found by all ranks: the group can continue
    operation.fail(std::current_exception());
  } catch (const std::exception&) {
    fail_alone(operation, std::current_exception());
  }
}

void ProgressEngine::fail_alone(Operation& operation, const std::exception_ptr& error) {
  // It is finished here, so `leave` would count it among those in which this rank has taken part.
  if (operation.is_collective()) first_lost_ = std::min(first_lost_, operation.sequence());
  if (!failed_alone_) {
    failed_alone_ = FailedAlone{error, str(operation.describe(), " has failed: ", reason_of(error))};
  }
  operation.fail(error);
}

void ProgressEngine::leave_if_failed_alone() {
  const auto failed = std::exchange(failed_alone_, {});
  if (!failed) return;
  // Later calls throw it again: that no memory was left once would not tell why they cannot run.
  const bool says_why = is_a<Error>(failed->error);
  const std::string text = str("group '", name(), "' has ended: ", failed->reason);
  abandon(says_why ? failed->error : std::make_exception_ptr(Error(text)), failed->reason);
}

void ProgressEngine::poll_operation(Operation& operation, unsigned polls) {
  Backoff pause = Backoff::for_fast_path(options_.oversubscribed);
  for (unsigned i = 0; i < polls && !operation.finished(); ++i) {
    if (i != 0 && pause.step()) break;
    advance(operation);
  }
  drop_finished();
  leave_if_failed_alone();
}

void ProgressEngine::progress() {
  const std::lock_guard lock(mutex_);
  if (forked_) std::rethrow_exception(broken_);
  try {
    inbox_.poll();
  } catch (const std::exception& error) {
    failed_alone_ = FailedAlone{std::current_exception(), str("it cannot receive messages: ", error.what())};
  }
  for_each_operation([this](Operation& operation) { advance(operation); });
  drop_finished();
  leave_if_failed_alone();
}

void ProgressEngine::drop_finished() {
  if (!usable() || !departures_.empty()) return;  // the transport may still access the buffers of failed operations
  while (!collectives_.empty() && collectives_.front()->finished()) collectives_.pop_front();
  std::erase_if(pending_messages_, [](const auto& operation) { return operation->finished(); });
}

void ProgressEngine::wait(Operation& operation, const Deadline& deadline) {
  Backoff pause(
      options_.oversubscribed, [this] { return transport_->wait_for_activity(); },
      [this] { return transport_->make_waiter(); });
  bool warned = false;
  Seconds ping_at = kPingAfter;
  std::uint64_t moved = 0;
  while (!operation.done()) {
    // relaxed: only whether it has changed matters, and a late look costs one more pause
    if (const std::uint64_t now = progress_count_.load(std::memory_order_relaxed) + transport_->ended(); now != moved) {
      moved = now;
      pause.note_progress();
    }
    if (!pause.step()) continue;
    wait_hooks().interrupt();
    progress_all();
    if (pause.waited() > ping_at) {
      ping_at = pause.waited() + kPingAgainAfter;
      ping(operation);
    }
    poll_peer_failures();
    revoke_if_left_behind(operation);
    if (operation.finished()) break;  // then the deadline does not matter
    if (deadline.passed()) {
      note_late(operation, deadline.timeout());
      std::rethrow_exception(timeout_error(operation, deadline.timeout()));
    }
    if (!warned && pause.waited().count() > wait_hooks().warn_after_s) {
      warned = true;
      wait_hooks().warn(timeout_message(operation, pause.waited()) + ": still waiting");
    }
  }
  if (!operation.error()) return;
  follow_the_lost();
  std::rethrow_exception(operation.error());
}

void ProgressEngine::ping(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (!usable() || operation.finished()) return;
  if (operation.is_collective()) header_exchange_->on_slow_wait(operation.sequence());
  const bool few = size_ <= kPingAllUpTo;
  if (!few) {
    for (const int peer : operation.pending_peers_of_operation()) transport_->ping(peer);
  }
  for (int i = 0; i < (few ? size_ : kPingRoundRobin); ++i) {  // the ranks that are waited for may wait for a dead one
    next_pinged_ = (next_pinged_ + 1) % size_;
    if (next_pinged_ != rank_) transport_->ping(next_pinged_);
  }
}

std::string ProgressEngine::wait_text(const std::vector<int>& late, Seconds waited) const {
  return str(" has waited ", std::round(waited.count() * 100) / 100, " s for ",
             late.empty() ? "data from ranks that have arrived" : departures_.list(late));
}

std::string ProgressEngine::timeout_message(Operation& operation, Seconds waited) {
  const std::lock_guard lock(mutex_);
  const std::vector<int> late = operation.pending_peers_of_operation();
  std::vector<int> here;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(late.begin(), late.end(), rank) == late.end()) here.push_back(rank);
  }
  std::string text = str(departures_.name(rank_), ": ", operation.describe(), wait_text(late, waited));
  if (operation.is_collective() && !late.empty()) text += "; arrived: " + departures_.list(here);
  return text;
}

std::exception_ptr ProgressEngine::timeout_error(Operation& operation, Seconds waited) {
  const std::lock_guard lock(mutex_);
  return std::make_exception_ptr(TimeoutError(timeout_message(operation, waited) + ": the deadline has passed",
                                              departures_.named(operation.pending_peers_of_operation())));
}

void ProgressEngine::note_late(Operation& operation, Seconds waited) {
  const std::lock_guard lock(mutex_);
  const std::vector<int> late = operation.pending_peers_of_operation();
  Departure why = Departure::of(Departure::Why::late, departures_.world_rank(rank_),
                                str("it", wait_text(late, waited), " in ", operation.describe()));
  for (const int rank : late) {
    if (why.n_late < Departure::kMaxLate) why.late[why.n_late++] = departures_.world_rank(rank);
  }
  late_ = why;
}

// ---- ranks that leave

bool ProgressEngine::has_lost_ranks() { return ranks_are_lost; }
bool ProgressEngine::has_departed_ranks() { return ranks_have_left; }

void ProgressEngine::poll_peer_failures() {
  const std::lock_guard lock(mutex_);
  if (closed_ || forked_ || is_discarded()) return;
  bool some_died = false;
  const std::map<int, Departures::Entry> news = new_departures(some_died);
  // A rank that learns of a death from another rank must not wait for MPI_Finalize either.
  if (some_died) ranks_are_lost = true;
  if (broken_) {  // no operation to fail; `is_last` asks for the departures
    for (const auto& [peer, entry] : news) departures_.add(peer, entry);
    return;
  }
  if (news.empty()) return;
  const auto is_revocation = [](const auto& entry) { return entry.second.why.why == Departure::Why::revoked; };
  if (!std::ranges::all_of(news, is_revocation)) ranks_have_left = true;
  for (int peer = 0; peer < size_; ++peer) transport_->ping(peer);  // a rank may have left because another one has died
  progress();                                                       // completes what they sent before they left
  for (const auto& [peer, entry] : news) departures_.add(peer, entry);
  fail_bereft();
  drop_finished();
}

void ProgressEngine::fail_bereft() {
  if (departures_.empty()) return;
  for_each_operation([this](Operation& operation) {
    if (operation.finished()) return;
    int first = -1;  // the first of the ranks it needs that has left: the cause
    for (const auto& [peer, entry] : departures_.entries()) {
      if (!operation.needs(peer, entry.first_absent)) continue;
      if (first < 0 || entry.why.time_ns < departures_.entries().at(first).why.time_ns) first = peer;
    }
    if (first >= 0) fail_dependents(operation, first);
  });
}

void ProgressEngine::fail_dependents(Operation& operation, int peer) {
  const Departure& why = departures_.entries().at(peer).why;
  const std::string what = operation.describe();
  const auto lose = [&](std::exception_ptr error, bool ends_family) {
    lost_ = Lost{error, why, ends_family};
    operation.fail(std::move(error));
  };
  if (operation.is_collective()) first_lost_ = std::min(first_lost_, operation.sequence());
  const std::vector<int> late = departures_.late_behind(peer);
  if (operation.is_collective() && !late.empty()) {  // this rank waits for the same late ranks
    const std::string text = str(departures_.name(rank_), ": ", what, " waits for ", departures_.list(late), "; ",
                                 departures_.name(peer), " has given up: ", why.text.data());
    const TimeoutError timed_out(text + ": the deadline has passed", departures_.named(late));
    return lose(std::make_exception_ptr(timed_out), false);
  }
  std::string text = str(what, ": ", departures_.text(peer));
  const std::vector<int> others = operation.pending_peers_of_operation();
  if (!operation.is_collective() && !others.empty() && std::find(others.begin(), others.end(), peer) == others.end()) {
    text += "; the message could still have arrived from " + departures_.list(others);
  }
  if (why.why == Departure::Why::revoked) {
    return lose(std::make_exception_ptr(StepError(text)), false);
  }
  // If a rank has left this group only, its other groups continue.
  lose(std::make_exception_ptr(PeerLostError(text, departures_.lost(peer))), why.why != Departure::Why::late);
}

void ProgressEngine::follow_the_lost() {
  std::optional<Lost> lost;
  {
    const std::lock_guard lock(mutex_);
    if (usable()) lost = std::exchange(lost_, {});
  }
  if (!lost) return;
  leave(lost->error, lost->why);
  if (lost->ends_family) options_.family->leave(lost->error, lost->why);
}

void ProgressEngine::join_family() {
  if (!std::exchange(in_family_, true)) options_.family->add(shared_from_this());
}

void ProgressEngine::abandon(const std::exception_ptr& error, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const int me = departures_.world_rank(rank_);
  Departure why = Departure::of(Departure::Why::failed, me, reason);
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError&) {
    if (late_) {
      why = *late_;
    } else if (!options_.world_ranks.empty()) {
      why.why = Departure::Why::late;  // another engine of this rank has waited, as for device arrays
    }
  } catch (const NotInitializedError&) {
    why.why = Departure::Why::finished;
  } catch (...) {
    if (!options_.world_ranks.empty()) why.why = Departure::Why::late;  // the world may continue
  }
  leave(error, why);
}

void ProgressEngine::leave(const std::exception_ptr& error, const Departure& why) {
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  progress();  // what all other ranks have finished is finished here, too
  if (!usable()) return;
  broken_ = error;
  // Peers may still work on operations that have failed here, whose buffers belong to the caller again: they must not
  // touch them.
  LeaveNotice& notice = leave_notice_.emplace(LeaveNotice{std::min(next_sequence_, first_lost_), why});
  for (const auto& operation : collectives_) {
    if (!operation->finished()) notice.first_absent = std::min(notice.first_absent, operation->sequence());
  }
  transport_->detach_sends();
  header_exchange_->leave(notice.first_absent, why);  // in shared memory peers see this before any message
  on_leave_(notice.first_absent);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || departures_.contains(peer)) continue;
    transport_->send(&notice, sizeof notice, peer, tags::kLeaveNotice);
  }
  for_each_operation([&](Operation& operation) { operation.fail(error); });
  header_exchange_->abandon();
  inbox_.abandon();
  retain_forever();  // sends cannot be cancelled: the memory that they read must outlive them
}

void ProgressEngine::finish_collectives(const Deadline& deadline) {
  std::vector<std::shared_ptr<Operation>> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.assign(collectives_.begin(), collectives_.end());
  }
  for (const auto& operation : pending) {
    try {
      wait(*operation, deadline);
    } catch (const Error&) {  // it is thrown to the caller who waits for the operation
    }
  }
}

/// Fails what no rank completes any more. The caller keeps the buffers of a failed operation: the transport may still
/// access them.
void ProgressEngine::fail_pending() {
  progress();
  if (!usable()) return;
  for_each_operation([](Operation& operation) {
    if (operation.finished()) return;
    operation.fail(std::make_exception_ptr(
        NotInitializedError(str(operation.describe(),
                                ": the group was closed before the operation ended; wait for it "
                                "before close() or finalize()"))));
  });
  collectives_.clear();
  pending_messages_.clear();
}

void ProgressEngine::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  if (broken_ == nullptr) fail_pending();
  const bool whole = broken_ == nullptr;
  if (whole) {
    header_exchange_->abandon();
    inbox_.abandon();
    if (transport_->holds_memory()) retain_forever();
  }
  closed_ = true;
  if (whole) transport_->close();  // collective: a rank that has left takes no part in it
}

}  // namespace samestep
