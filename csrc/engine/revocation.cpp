// Blocks of `together()`: how a group ends on all ranks, wherever they wait, without any other group. As
// MPI_Comm_revoke of ULFM (Bland et al., "Post-failure recovery of MPI communication capability", 2013).

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "engine/operation.h"
#include "engine/progress_engine.h"
#include "transport/tags.h"

namespace samestep {
namespace {

/// The engines that are kept for as long as the process lives; see retain_forever.
// Never destroyed: until the process has ended, the transport may access the memory that these engines keep.
std::vector<std::shared_ptr<ProgressEngine>>& retained_engines() {
  static auto& all = *new std::vector<std::shared_ptr<ProgressEngine>>;
  return all;
}
std::mutex& retained_engines_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

}  // namespace

void ProgressEngine::revoke(const std::string& why, std::uint64_t block) {
  const std::lock_guard lock(mutex_);
  Departure departure = Departure::of(Departure::Why::revoked, departures_.world_rank(rank_), why);
  departure.block = block;
  leave(std::make_exception_ptr(StepError(str("together() in group '", name(), "': ", why))), departure);
}

/// A rank that is ahead may have revoked the group in a block that this rank has not entered: what it does before is to
/// end well.
bool ProgressEngine::is_revoked() {
  const std::lock_guard lock(mutex_);
  return !usable() || std::ranges::any_of(departures_.entries(), [this](const auto& entry) {
    const Departure& why = entry.second.why;
    return why.why == Departure::Why::revoked && options_.family->is_open(why.block);
  });
}

void ProgressEngine::announce_block_end(std::uint64_t block) {
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  // Sends of earlier notices read their memory, so that only those that have been sent are freed.
  std::erase_if(block_end_notices_, [this](const auto& notice) {
    return std::ranges::all_of(notice->sends, [this](auto& request) { return transport_->test(request); });
  });
  auto notice = std::make_unique<BlockEndNotice>();
  // This rank has started all collectives below `next_sequence_`, so a peer that waits in one of them is not left
  // behind.
  notice->end = {block, next_sequence_};
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    notice->sends.push_back(transport_->send(&notice->end, sizeof notice->end, peer, tags::kBlockEndNotice));
  }
  block_end_notices_.push_back(std::move(notice));
}

void ProgressEngine::revoke_if_left_behind(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (!options_.family->has_open_blocks()) return;
  if (!usable() || !operation.is_collective() || operation.finished()) return;
  Transport::Envelope from;
  BlockEnd end{};
  while (transport_->take_arrived(tags::kBlockEndNotice, &end, sizeof end, from)) block_ends_[from.source] = end;
  if (block_ends_.empty()) return;
  for (const int peer : operation.pending_peers_of_operation()) {
    const auto found = block_ends_.find(peer);
    if (found == block_ends_.end() || operation.sequence() < found->second.first_absent) continue;
    // A notice about a block that this rank has left, or has not entered yet, says nothing about this wait.
    if (!options_.family->is_open(found->second.block)) continue;
    return revoke(str(operation.describe(), " waits for ", departures_.name(peer),
                      ", which is at the end of the block without this call"),
                  found->second.block);
  }
}

/// For waits that are not in `wait`: those for operations on a device.
void ProgressEngine::check_peers() {
  poll_peer_failures();
  std::shared_ptr<Operation> oldest;
  {
    const std::lock_guard lock(mutex_);
    // Collectives complete in order, so the peers that the oldest waits for hold up all others.
    if (!collectives_.empty()) oldest = collectives_.front();
  }
  if (oldest != nullptr) revoke_if_left_behind(*oldest);
}

std::exception_ptr ProgressEngine::lost(const std::string& what) {
  check_peers();
  const std::lock_guard lock(mutex_);
  if (departures_.empty()) return nullptr;
  const auto time_of = [](const auto& entry) { return entry.second.why.time_ns; };
  const auto& [peer, entry] = *std::ranges::min_element(departures_.entries(), {}, time_of);
  const std::string text = str(what, ": ", departures_.text(peer));
  if (entry.why.why == Departure::Why::revoked) return std::make_exception_ptr(StepError(text));
  return std::make_exception_ptr(PeerLostError(text, departures_.lost(peer)));
}

/// Frees the memory of operations if the transport no longer accesses it; otherwise the engine keeps it.
bool ProgressEngine::discard() {
  const std::shared_ptr<ProgressEngine> self = shared_from_this();  // operations may hold the last reference
  const std::lock_guard lock(mutex_);
  // MPI may access the memory of requests that have not completed at any time, so its transport never forgets it.
  if (broken_ == nullptr || closed_ || forked_ || !transport_->forgets_at_close()) return false;
  transport_->close();
  free_operations();
  return true;
}

void ProgressEngine::free_operations() {
  collectives_.clear();
  pending_messages_.clear();
  leave_notice_.reset();
  block_end_notices_.clear();
  release_retained();
  discarded_.store(true, std::memory_order_release);  // pairs with is_discarded: the memory is free after it
}

std::map<int, Departures::Entry> ProgressEngine::new_departures(bool& some_died) {
  std::map<int, Departures::Entry> news;
  // Before the notices: a rank that is found dead here may have sent one before it died.
  const std::vector<Transport::PeerFailure> failures = transport_->failed_peers();
  Transport::Envelope from;
  LeaveNotice notice{};
  while (transport_->take_arrived(tags::kLeaveNotice, &notice, sizeof notice, from)) {
    notice.why.text.back() = '\0';
    if (!departures_.contains(from.source))
      news.emplace(from.source, Departures::Entry{notice.first_absent, notice.why});
  }
  for (const Transport::PeerFailure& failure : failures) {
    const int rank = departures_.world_rank(failure.peer);
    const Departure why = failure.why.value_or(Departure::of(Departure::Why::died, rank, failure.text));
    if (!failure.why) some_died = true;
    if (!departures_.contains(failure.peer)) news.emplace(failure.peer, Departures::Entry{failure.first_absent, why});
  }
  const auto tells_of_death = [](const auto& entry) { return entry.second.why.why == Departure::Why::died; };
  some_died = some_died || std::ranges::any_of(news, tells_of_death);
  return news;
}

bool ProgressEngine::is_last() {
  // Not a loss of this process: a peer's connection may end before its notice has been sent.
  bool some_died = false;
  for (const auto& [peer, entry] : new_departures(some_died)) departures_.add(peer, entry);
  for (int peer = 0; peer < size_; ++peer) {
    // A rank sends no notice to those of which it had one, and over TCP they learn that it has left when it closes.
    if (peer != rank_ && !departures_.contains(peer) && !transport_->has_closed(peer)) return false;
  }
  return true;
}

/// A rank that has left no longer runs the operations of the group: nobody accesses the memory of any once all have.
std::size_t ProgressEngine::discard_abandoned() {
  std::vector<std::shared_ptr<ProgressEngine>> all;
  {
    const std::lock_guard guarded(retained_engines_mutex());
    all = retained_engines();
  }
  std::size_t n_discarded = 0;
  for (const auto& engine : all) {
    // If another thread holds the mutex, the group is discarded at a later call.
    const std::unique_lock alone(engine->mutex_, std::try_to_lock);
    if (!alone.owns_lock() || engine->broken_ == nullptr || engine->forked_ || engine->is_discarded()) continue;
    try {
      if (!engine->transport_->forgets_at_close() || !engine->is_last()) continue;
      engine->transport_->close_last();
      engine->free_operations();
      ++n_discarded;
    } catch (const std::exception&) {  // of the transport: the group stays
    }
  }
  return n_discarded;
}

void ProgressEngine::retain_forever() {
  const std::lock_guard lock(mutex_);
  if (retained_ || (closed_ && !broken_)) return;
  retained_ = true;
  const std::lock_guard guarded(retained_engines_mutex());
  retained_engines().push_back(shared_from_this());
}

void ProgressEngine::release_retained() {
  const std::lock_guard guarded(retained_engines_mutex());
  std::erase(retained_engines(), shared_from_this());
}

}  // namespace samestep
