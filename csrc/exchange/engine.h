#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/fork_listener.h"
#include "core/quick_mutex.h"
#include "exchange/choice.h"
#include "exchange/inbox.h"
#include "exchange/meeting.h"
#include "exchange/messenger.h"
#include "exchange/scratch.h"

namespace samestep {

class Collective;
class Operation;

/// How an ExchangeCommunicator is set up.
struct ExchangeOptions {
  std::string name = "world";
  std::vector<std::string> hosts = {};  ///< by rank, for texts; empty where all ranks share one
  std::uint32_t number = 0;             ///< of the group, for its messenger; see Messenger::next_group
  bool oversubscribed = false;          ///< more ranks than CPUs: give way at once instead of spinning
  std::size_t inline_limit = 0;         ///< most bytes that travel with a header; 0 = by the number of ranks
  int spread_above = 16;                ///< ranks, from which on they meet in log2 of their number of messages
  std::size_t window_piece = 0;         ///< bytes of one rank's part of a window; 0 = default
  std::optional<Way> way = {};          ///< of long reductions; the cheapest where it is not given
};

/// The state that the operations of one group share: the messenger, the order of operations, who has left.
///
/// Whoever waits drives all operations; `mutex` is held for each step, and not while pausing but by calls that look for
/// less than a millisecond whether they can end at once.
///
/// A process made by fork is no rank: there every use is refused.
class Engine : public std::enable_shared_from_this<Engine>, private ForkListener {
 public:
  /// Ranks meet by messages where `meeting` is null.
  Engine(std::unique_ptr<Messenger> messenger, ExchangeOptions options, std::unique_ptr<Meeting> meeting = nullptr);
  ~Engine() override;

  Messenger& messenger() { return *messenger_; }
  Meeting& meeting() { return *meeting_; }
  Inbox& inbox() { return inbox_; }
  Scratch& scratch() { return scratch_; }

  /// What a rank has for itself in a collective that only moves data. By memmove, unless `copy_own_by` was called.
  using Copy = std::function<void(std::byte* to, const std::byte* from, std::size_t nbytes)>;
  void copy_own(std::byte* to, const std::byte* from, std::size_t nbytes) {
    if (copy_own_ == nullptr) {
      std::memmove(to, from, nbytes);
    } else {
      copy_own_(to, from, nbytes);
    }
  }
  void copy_own_by(Copy copy) { copy_own_ = std::move(copy); }
  const ExchangeOptions& options() const { return options_; }
  const std::string& name() const { return options_.name; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Numbers the operation, begins it and lets it advance. Throws if the group is closed or broken.
  void start(const std::shared_ptr<Operation>& operation);

  /// May a collective be done at once, outside the queue? Then the caller announces operation `next_sequence`, and
  /// ends it by `pass`; or says that it is announced, and starts the operation. With the mutex held.
  bool idle() const {
    // Messages under way may be what another rank waits for before it comes.
    return usable() && collectives_.empty() && messages_under_way_.empty() && departed_.empty();
  }
  std::uint64_t next_sequence() const { return next_sequence_; }
  void pass() { ++next_sequence_; }
  /// May messages be sent, or sent and received, at once?
  bool sends_at_once() const { return usable() && departed_.empty(); }
  bool receives_at_once() const { return idle() && inbox_.idle(); }
  void pass_message() { ++point_to_point_started_; }
  /// An operation has moved or reduced data, which is told to who waits. With the mutex held, so no exchange is needed,
  /// which would wait until others can see what was stored.
  void moved() { moved_.store(moved_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  void next_is_announced() { next_is_announced_ = true; }

  /// While this lives, a collective that is started with none before it is driven at once, for so many polls: it may
  /// have ended when `start` returns. With the mutex held.
  class AtOnce {
   public:
    AtOnce(Engine& engine, unsigned polls) : engine_(engine) { engine_.polls_at_start_ = polls; }
    ~AtOnce() { engine_.polls_at_start_ = 0; }
    AtOnce(const AtOnce&) = delete;
    AtOnce& operator=(const AtOnce&) = delete;

   private:
    Engine& engine_;
  };

  /// Lets every operation advance one step. Throws in a process made by fork.
  void progress();
  /// The same in all groups of this process that nobody else is in: while a rank waits in one, peers may wait for it
  /// in another.
  static void progress_everywhere();

  /// Waits for an operation until `deadline`; see Work::wait.
  void wait(Operation& operation, const Deadline& deadline);

  /// One slow step of waiting: has a peer said farewell? Operations that need it fail.
  void look_for_farewells();

  /// This rank gives up: outstanding operations fail with `error`, as does every later verb; peers are
  /// told `reason`. Nobody is waited for.
  void abandon(std::exception_ptr error, const std::string& reason);

  /// `leaving` is told when this rank gives up: the first collective that it takes no part in.
  void when_leaving(std::function<void(std::uint64_t)> leaving) { leaving_ = std::move(leaving); }

  /// After a collective end: frees the messenger.
  void close();

  /// Unless it was closed: keeps all of it, for the transport may still read and write its memory.
  void keep_for_good();

  void set_hosts(std::vector<std::string> hosts) { options_.hosts = std::move(hosts); }
  /// See Communicator.
  void set_terms(std::optional<Way> way, std::size_t window_piece, std::size_t max_message) {
    options_.way = way;
    options_.window_piece = window_piece;
    if (max_message != 0) messenger_->limit_messages(max_message);
  }
  void prefer_pieces(std::size_t nbytes) {
    if (options_.window_piece == 0) options_.window_piece = nbytes;
  }
  void set_oversubscribed(bool oversubscribed);

  bool usable() const { return broken_ == nullptr && !closed_; }
  /// Throws what made the group unusable.
  void require_usable() const;

  QuickMutex& mutex() { return mutex_; }
  std::uint64_t operations_started() const { return next_sequence_ + point_to_point_started_; }
  std::uint64_t messages() const { return meeting_->messages_sent() + messages_; }
  std::uint64_t bytes() const { return meeting_->bytes_sent() + bytes_; }
  void count_message(std::size_t nbytes) {
    ++messages_;
    bytes_ += nbytes;
  }
  /// The number that tells the body of this rank's next long message from others.
  std::uint32_t next_body() { return next_body_++; }

  /// Text of a TimeoutError: the operation, who arrived, and who did not, on which hosts.
  std::string late_text(Operation& operation, Seconds waited);

 private:
  struct Departed {
    std::uint64_t first_missing;  // the first operation it takes no part in
    std::string text;
  };
  std::string list(const std::vector<int>& ranks) const;
  std::string on_host(int rank) const;
  void ask_after(Operation& operation);
  std::string text_of(const Messenger::Loss& loss, const std::vector<Messenger::Loss>& losses) const;
  void let_go(int peer, const Departed& departed);
  void fail_without(int peer, const Departed& departed);
  /// One step. What went wrong with the transport, if anything did.
  static std::exception_ptr advance(Operation& operation);
  void drive(Operation& operation, unsigned polls);
  void drop_finished();
  void register_once();
  void before_fork() noexcept override {}
  void after_fork_in_parent() noexcept override {}
  void after_fork_in_child() noexcept override;

  std::unique_ptr<Messenger> messenger_;
  const int rank_;
  const int size_;
  int next_asked_ = 0;  // in a large group
  ExchangeOptions options_;
  Inbox inbox_;
  std::unique_ptr<Meeting> meeting_;
  Scratch scratch_;
  Copy copy_own_;
  QuickMutex mutex_;
  std::deque<std::shared_ptr<Operation>> collectives_;  // under way, in order of sequence
  std::vector<std::shared_ptr<Operation>> messages_under_way_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t point_to_point_started_ = 0;
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint32_t next_body_ = 0;
  std::atomic<std::uint64_t> moved_{0};
  std::map<int, Departed> departed_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> farewells_;  // must outlive their sends
  std::function<void(std::uint64_t)> leaving_ = [](std::uint64_t) {};
  std::exception_ptr broken_;
  std::exception_ptr refusal_;  // of a process made by fork; there it is `broken_`
  bool closed_ = false;
  bool forked_ = false;  // this process was, from the rank
  bool kept_ = false;
  bool registered_ = false;
  bool next_is_announced_ = false;
  unsigned polls_at_start_ = 0;  // see AtOnce
};

}  // namespace samestep
