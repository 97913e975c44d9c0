#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "communicator/group_settings.h"
#include "communicator/membership.h"
#include "communicator/signature.h"
#include "core/deadline.h"
#include "engine/algorithm.h"
#include "engine/departures.h"
#include "engine/family.h"
#include "engine/header_exchange.h"
#include "engine/message_inbox.h"
#include "engine/scratch.h"
#include "process/fork_listener.h"
#include "process/progress_source.h"
#include "transport/tags.h"
#include "transport/transport.h"

namespace samestep {

class Operation;

/// The set-up of an ExchangeCommunicator.
struct ExchangeOptions {
  std::string name = "world";
  std::vector<std::string> hosts = {};      ///< by rank, for error texts; empty if there is one host
  Naming naming = Naming::samestep;         ///< of operations in error texts
  std::vector<int> world_ranks = {};        ///< by rank, for error texts; empty for the world itself
  std::shared_ptr<Family> family = {};      ///< of the parent group; null for a world
  std::uint32_t id = 0;                     ///< of the group; see Transport::reserve_group_id
  bool oversubscribed = false;              ///< more ranks than CPUs: yield at once, without spinning
  std::size_t inline_limit = 0;             ///< bytes of data behind a header; 0: by the number of ranks
  int bruck_above = 16;                     ///< larger groups use BruckHeaderExchange
  std::size_t segment_bytes = 0;            ///< of one rank's part of a segment; 0: the default
  std::size_t message_segment = 0;          ///< see GroupSettings; 0: messages are not split
  std::optional<Algorithm> algorithm = {};  ///< of long reductions; nullopt: the cheapest
};

/// The state that the operations of one group share: the transport, the order of operations, the ranks that have left.
///
/// There is no progress thread: a waiting thread advances all operations. It holds `mutex` for one step at a time and
/// releases it while it pauses. The exception is the fast path, which holds it for at most a millisecond.
///
/// A process made by fork is not a rank: there every use throws.
class ProgressEngine : public std::enable_shared_from_this<ProgressEngine>,
                       public Membership,
                       public ProgressSource,
                       private ForkListener {
 public:
  /// Headers travel in messages of the transport if `header_exchange` is null.
  ProgressEngine(std::unique_ptr<Transport> transport, ExchangeOptions options,
                 std::unique_ptr<HeaderExchange> header_exchange = nullptr);
  ~ProgressEngine() override;

  Transport& transport() { return *transport_; }
  HeaderExchange& header_exchange() { return *header_exchange_; }
  MessageInbox& inbox() { return inbox_; }
  Scratch& scratch() { return scratch_; }

  /// Copies what a rank sends to itself in a collective that only moves data; see GroupSettings.
  void copy_local(std::byte* to, const std::byte* from, std::size_t nbytes) {
    if (copy_local_ == nullptr) {
      std::memmove(to, from, nbytes);
    } else {
      copy_local_(to, from, nbytes);
    }
  }
  const ExchangeOptions& options() const { return options_; }
  const std::string& name() const { return options_.name; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Numbers the operation, starts it and makes a step. Throws if the group is closed or broken.
  void start(const std::shared_ptr<Operation>& operation);

  /// Whether a collective may run outside the queue. The caller posts operation `next_sequence` and then either
  /// completes it and calls `complete_inline`, or calls `adopt_posted_header` and starts the operation. Requires the
  /// mutex held throughout.
  bool is_idle() const {
    // A peer may wait for a message in flight before it calls the collective.
    return usable() && collectives_.empty() && pending_messages_.empty() && departures_.empty();
  }
  std::uint64_t next_sequence() const { return next_sequence_; }
  void complete_inline() { ++next_sequence_; }
  /// Whether messages may be sent, or also received, outside the queue.
  bool can_send_inline() const { return usable() && departures_.empty(); }
  bool can_receive_inline() const { return is_idle() && inbox_.is_idle(); }
  void complete_message_inline() { ++point_to_point_started_; }
  /// Records that an operation has moved or reduced data, for the pauses of waiting threads. A plain increment serves,
  /// because the mutex is held: an atomic one would wait until earlier stores are visible to other CPUs. Relaxed: it
  /// publishes nothing.
  void note_progress() {
    progress_count_.store(progress_count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void adopt_posted_header() { adopts_posted_header_ = true; }

  /// The next `start` polls a collective that has none before it for so many times, so that it may have completed when
  /// `start` returns. Requires the mutex held from here on.
  void poll_at_start(unsigned polls) { polls_at_start_ = polls; }

  /// Advances every operation by one step. Throws in a process made by fork.
  void progress();
  /// The same, unless another thread holds the mutex: then that thread makes the progress.
  void advance() override;

  /// Waits for an operation until `deadline`; see Work::wait.
  void wait(Operation& operation, const Deadline& deadline);

  /// Fails the operations that need a peer which has left. Slow: call about every millisecond of waiting.
  void poll_peer_failures();
  /// Whether a peer of any group has died since this process began. Then MPI_Finalize may never return.
  static bool has_lost_ranks();
  /// Whether a peer has left a group before this rank did, dead or alive.
  static bool has_departed_ranks();

  /// Leaves the group: outstanding operations and all later calls fail with `error`, and peers receive `reason`. Does
  /// not wait. Peers interpret the class of `error`: NotInitializedError, the program has ended normally; a
  /// TimeoutError of `wait`, ranks were late.
  void abandon(const std::exception_ptr& error, const std::string& reason);
  /// The same with the report that peers receive.
  void leave(const std::exception_ptr& error, const Departure& why);

  void revoke(const std::string& why, std::uint64_t block) override;
  bool is_revoked() override;
  bool discard() override;
  bool is_discarded() const override {
    return discarded_.load(std::memory_order_acquire);  // pairs with the release in `discard`
  }
  void open_block(std::uint64_t block) override { options_.family->open_block(block); }
  void close_block(std::uint64_t block) override { options_.family->close_block(block); }
  void announce_block_end(std::uint64_t block) override;
  /// `poll_peer_failures`, and revokes the group if its oldest collective waits for a rank at the end of the block.
  void check_peers() override;
  std::exception_ptr lost(const std::string& what) override;

  const Departures& departures() const { return departures_; }
  /// To be called once, when a shared pointer owns this.
  void join_family();

  /// `leaving` is called when this rank leaves, with the first collective in which it takes no part.
  void set_on_leave(std::function<void(std::uint64_t)> leaving) { on_leave_ = std::move(leaving); }

  /// Waits until the collectives in progress have ended, with or without an error.
  void finish_collectives(const Deadline& deadline);

  /// Fails the operations that are still pending and frees the transport. To be called after a barrier of all ranks.
  void close();

  /// Unless the group was closed: keeps this object until it is discarded, perhaps forever, because the transport may
  /// still access its memory.
  void retain_forever();
  /// Takes that back; `retain_forever` is called no more.
  void release_retained();
  /// Discards the groups of this process that this rank has left, as far as all their other ranks have left them or
  /// ended, too. Never blocks. Returns the number of groups discarded.
  static std::size_t discard_abandoned();

  /// See Communicator::configure.
  void apply(const GroupSettings& settings);

  bool usable() const { return broken_ == nullptr && !closed_; }
  /// Throws the error that made the group unusable, if there is one.
  void require_usable() const;

  /// Recursive: a step may end the group, which makes a last step.
  std::recursive_mutex& mutex() { return mutex_; }
  std::uint64_t operations_started() const { return next_sequence_ + point_to_point_started_; }
  std::uint64_t messages() const { return header_exchange_->messages_sent() + messages_; }
  std::uint64_t bytes() const { return header_exchange_->bytes_sent() + bytes_; }
  void count_message(std::size_t nbytes) {
    ++messages_;
    bytes_ += nbytes;
  }
  /// A number for the body of this rank's next long message.
  std::uint32_t next_body_id();
  /// Keeps the tag of this body from the bodies of later messages, as long as it has segments to send.
  void open_body(std::uint32_t number) { open_bodies_.insert(tags::of_body(number)); }
  void close_body(std::uint32_t number) { open_bodies_.erase(tags::of_body(number)); }
  /// The length of the segments of a message. The same on both of its ranks.
  std::size_t segment_nbytes(std::size_t nbytes) const;

  /// Text of a TimeoutError: the operation, and which ranks on which hosts have arrived and which have not.
  std::string timeout_message(Operation& operation, Seconds waited);

 private:
  /// The error of an operation whose deadline has passed.
  std::exception_ptr timeout_error(Operation& operation, Seconds waited);
  /// Why an operation has failed: a rank has left.
  struct Lost {
    std::exception_ptr error;
    Departure why;
    bool ends_family;
  };
  template <class Act>
  void for_each_operation(Act act) {
    for (const auto& operation : collectives_) act(*operation);
    for (const auto& operation : pending_messages_) act(*operation);
  }
  /// For texts: how long somebody has waited for these ranks.
  std::string wait_text(const std::vector<int>& late, Seconds waited) const;
  void ping(Operation& operation);
  /// Revokes the group if the operation waits for a rank that is at the end of a block this rank is in.
  void revoke_if_left_behind(Operation& operation);
  /// Sent to all peers by a rank that leaves, because they may wait for it.
  struct LeaveNotice {
    std::uint64_t first_absent;
    Departure why;
  };
  /// The ranks that have left since the last call. `some_died`: set if a process has ended.
  std::map<int, Departures::Entry> new_departures(bool& some_died);
  /// Whether all other ranks have left the group or ended.
  bool is_last();
  /// Frees the operations and their memory once the transport is closed. Requires the mutex held.
  void free_operations();
  /// Fails the operations that need a rank which has left.
  void fail_bereft();
  void fail_dependents(Operation& operation, int peer);
  /// Records why a deadline has passed, for `abandon`.
  void note_late(Operation& operation, Seconds waited);
  /// If the loss of a rank has ended an operation: leaves the group, and the family. The caller must not hold the
  /// mutex.
  void follow_the_lost();
  /// Makes one step. An error ends the group, unless all ranks find it.
  void advance(Operation& operation);
  /// Ends an operation that other ranks continue, and then the group, because they wait for this rank.
  void fail_alone(Operation& operation, const std::exception_ptr& error);
  /// Leaves the group if an operation has failed on this rank alone. Not while operations are iterated over.
  void leave_if_failed_alone();
  void poll_operation(Operation& operation, unsigned polls);
  void drop_finished();
  void fail_pending();
  void after_fork_in_child() noexcept override;

  std::unique_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  int next_pinged_ = 0;  // in a large group
  ExchangeOptions options_;
  MessageInbox inbox_;
  std::unique_ptr<HeaderExchange> header_exchange_;
  Scratch scratch_;
  std::function<void(std::byte* to, const std::byte* from, std::size_t nbytes)> copy_local_;
  std::recursive_mutex mutex_;
  std::deque<std::shared_ptr<Operation>> collectives_;  // in progress, in order of sequence
  std::vector<std::shared_ptr<Operation>> pending_messages_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t point_to_point_started_ = 0;
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint32_t next_body_id_ = 0;
  std::set<int> open_bodies_;  // tags
  std::atomic<std::uint64_t> progress_count_{0};
  Departures departures_;
  std::optional<Lost> lost_;
  std::uint64_t first_lost_ = UINT64_MAX;  // the first collective that has failed here and may still run elsewhere
  struct FailedAlone {
    std::exception_ptr error;
    std::string reason;
  };
  std::optional<FailedAlone> failed_alone_;  // until this rank has left because of it
  std::optional<Departure> late_;            // of the last deadline that has passed
  bool in_family_ = false;
  std::optional<LeaveNotice> leave_notice_;  // must outlive its sends
  struct BlockEnd {
    std::uint64_t block, first_absent;
  };
  std::map<int, BlockEnd> block_ends_;  // the last notice of each rank
  struct BlockEndNotice {
    BlockEnd end;
    std::vector<Transport::Request> sends;
  };
  std::vector<std::unique_ptr<BlockEndNotice>> block_end_notices_;  // until they are sent
  std::function<void(std::uint64_t)> on_leave_ = [](std::uint64_t) {};
  std::exception_ptr broken_;
  std::exception_ptr refusal_;  // becomes `broken_` in a process made by fork
  bool closed_ = false;
  bool forked_ = false;  // this is a process made by fork
  bool retained_ = false;
  std::atomic<bool> discarded_ = false;
  bool registered_ = false;
  bool adopts_posted_header_ = false;
  unsigned polls_at_start_ = 0;
};

}  // namespace samestep
