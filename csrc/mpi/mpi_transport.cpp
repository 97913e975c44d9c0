#include "mpi/mpi_transport.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "collectives/exchange_communicator.h"
#include "core/error.h"
#include "core/format.h"
#include "transport/tags.h"
#include "transport/transport.h"
#include "waiting/await.h"

namespace samestep {
namespace {

constexpr Seconds kBlameAfter{15};                         // longer than it takes to find out which rank has died
constexpr std::size_t kMaxMessage = std::size_t{1} << 30;  // bytes, below MPI's 2^31 - 1

/// A duplicate of a communicator, without blocking in MPI.
MpiLibrary::Handle duplicate(MpiLibrary& library, MpiLibrary::Handle comm, const Deadline& deadline) {
  static std::vector<std::unique_ptr<MpiLibrary::Handle>> late;  // MPI writes to it when it pleases
  auto made = std::make_unique<MpiLibrary::Handle>(0);
  MpiLibrary::Handle request = library.duplicate(comm, *made);
  MpiLibrary::Status status;
  await([&] { return library.test(request, status); },
        [&](Seconds) {
          if (!deadline.passed()) return;
          // The request of a nonblocking collective can be neither cancelled nor freed: MPI may still complete this
          // one.
          late.push_back(std::move(made));
          throw TimeoutError(str("initialize: not all ", library.size(comm),
                                 " ranks of the MPI world have called it after ", deadline.timeout().count(), " s"));
        });
  return *made;
}

/// A communicator of MPI for one or more groups, whose messages differ by their tags: MPI makes communicators by calls
/// that block without yielding, and take seconds where ranks share processors.
struct Channel {
  Channel(std::shared_ptr<MpiLibrary> mpi, MpiLibrary::Handle handle)
      : library(std::move(mpi)), comm(handle), rank(library->rank(comm)), size(library->size(comm)) {
    // MPI's default error handler ends the process, which would hide why.
    library->return_errors(comm);
  }

  /// Groups have the numbers below this one, as many as there are tags for.
  std::uint32_t most_groups() const {
    // In 64 bits, because the highest tag may be 2^31 - 1.
    return static_cast<std::uint32_t>((static_cast<std::int64_t>(library->facts().tag_limit) + 1) / tags::kEnd);
  }
  /// A number that no group of this rank has or had: what was sent in a group that has been closed may still come.
  std::uint32_t reserve() {
    const std::lock_guard lock(mutex);
    return next++;
  }
  void enter(std::uint32_t number) {
    const std::lock_guard lock(mutex);
    // Members of a new group agree on the highest of the numbers that they reserve. Two groups that are made at the
    // same time may thus get the same one, and would receive each other's messages.
    if (!groups.insert(number).second) {
      throw Error("two threads of this rank make groups of one world at the same time: make one after the other");
    }
    next = std::max(next, number + 1);
  }
  void leave(std::uint32_t number) {
    const std::lock_guard lock(mutex);
    groups.erase(number);
    // MPI_Comm_free is formally collective, but local in practice, and each rank frees when its own last group ends.
    // After MPI_Finalize no call is allowed.
    if (groups.empty() && !library->finalized()) library->free(comm);
  }

  std::shared_ptr<MpiLibrary> library;
  MpiLibrary::Handle comm;
  int rank;
  int size;
  std::mutex mutex;                      // groups have threads of their own
  std::set<std::uint32_t> groups = {0};  // in use by this rank; 0 = all ranks of the communicator
  std::uint32_t next = 1;
};

class MpiTransport final : public Transport {
 public:
  /// The group with this number of the communicator: of `members`, ranks there; empty: of all.
  explicit MpiTransport(std::shared_ptr<Channel> channel, std::uint32_t number = 0, std::vector<int> members = {})
      : channel_(std::move(channel)),
        library_(channel_->library),
        comm_(channel_->comm),
        number_(number),
        members_(std::move(members)),
        rank_of_(static_cast<std::size_t>(channel_->size), -1) {
    if (members_.empty()) {
      members_.resize(rank_of_.size());
      std::iota(members_.begin(), members_.end(), 0);
    }
    for (int rank = 0; rank < size(); ++rank) rank_of_[static_cast<std::size_t>(member(rank))] = rank;
    rank_ = rank_of_[static_cast<std::size_t>(channel_->rank)];
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string_view name() const override { return "mpi"; }
  std::size_t max_message() const override { return max_message_; }
  void set_max_message(std::size_t nbytes) override { max_message_ = std::min(nbytes, kMaxMessage); }

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override {
    // Inactive, and thus complete, if MPI fails: that is what Transport promises of a send to a failed peer.
    Request request;
    attempt([&] { request = {library_->send(comm_, data, static_cast<int>(nbytes), member(dest), own(tag)), true}; });
    return request;
  }

  Request receive(void* data, std::size_t capacity, int source, int tag) override {
    Request request{0, true};  // which never ends if MPI fails
    attempt([&] {
      request.bits = library_->receive(comm_, data, static_cast<int>(capacity), mpi_source(source), own(tag));
    });
    return request;
  }

  bool test(Request& request, Envelope* envelope) override {
    if (!request.active) return true;
    // Until then the watch may still find out which rank has died, and the error that names it tells more than MPI's.
    if (has_failed() && Clock::now() - failure_->at() > kBlameAfter) throw Error(failure_->text());
    MpiLibrary::Status status;
    bool ended = false;
    attempt([&] { ended = library_->test(request.bits, status); });
    if (!ended) return false;
    request.active = false;
    if (envelope != nullptr) *envelope = in_group(status);
    return true;
  }

  bool cancel(Request& request) override {
    // Also asked after a failure and after MPI_Finalize, when MPI may no longer be called.
    if (!request.active || library_->finalized()) return false;
    request.active = false;
    const bool cancelled = !has_failed() && library_->cancel(request.bits);
    if (request.bits != library_->facts().request_null) holds_memory_ = true;
    return cancelled;
  }

  bool holds_memory() const override { return holds_memory_; }

  bool probe(int tag, Envelope& envelope) override {
    MpiLibrary::Status status;
    bool found = false;
    attempt([&] { found = library_->probe(comm_, library_->facts().any_source, own(tag), status); });
    if (found) envelope = in_group(status);
    return found;
  }

  std::uint32_t reserve_group_id() override { return channel_->reserve(); }
  std::unique_ptr<Transport> subset(std::span<const int> ranks, std::uint32_t number) override {
    std::vector<int> list;
    for (const int rank : ranks) list.push_back(member(rank));
    std::unique_ptr<MpiTransport> made;
    if (number < channel_->most_groups()) {
      channel_->enter(number);
      made = std::make_unique<MpiTransport>(channel_, number, std::move(list));
    } else {
      // No tags are left for another group. All members have the same number, so all of them make a communicator
      // instead. Open MPI agrees on it by messages with this tag on the old one, which no other message may use.
      const MpiLibrary::Handle comm = library_->create_group(comm_, list, own(tags::kTransportMakesGroup));
      made = std::make_unique<MpiTransport>(std::make_shared<Channel>(library_, comm));
    }
    made->max_message_ = max_message_;
    made->share_watch(*this, ranks);
    return made;
  }

  void set_watch(std::shared_ptr<PeerWatch> watch) override {
    watch_ = std::move(watch);
    failure_ = std::make_shared<Failure>();
    reported_.resize(members_.size());
    watched_as_.resize(reported_.size());
    std::iota(watched_as_.begin(), watched_as_.end(), std::size_t{0});
  }

  void ping(int peer) override {
    if (watch_ == nullptr || peer == rank_) return;
    asks_ = true;
    watch_->watch(watched_as_[static_cast<std::size_t>(peer)]);
  }

  std::vector<PeerFailure> failed_peers() override {
    std::vector<PeerFailure> found;
    // An error of MPI does not say which rank has died, so all of them are checked.
    for (int peer = 0; has_failed() && peer < size(); ++peer) ping(peer);
    for (int peer = 0; asks_ && peer < size(); ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      if (reported_[i] || peer == rank_) continue;
      const std::string why = watch_->death(watched_as_[i]);
      reported_[i] = !why.empty();
      if (reported_[i]) found.push_back({peer, 0, why});
    }
    return found;
  }

  void close() override {
    watch_ = nullptr;
    asks_ = false;
    // After an error MPI is left alone. One communicator that is never freed is the price.
    if (!has_failed()) channel_->leave(number_);
  }

 private:
  /// After the death of a rank MPI may return errors, or crash at the next call. So if deaths are known otherwise, MPI
  /// is left alone after its first error, until it is known which rank has died.
  /// Thread-safe: groups have threads of their own.
  class Failure {
   public:
    bool has_happened() const { return happened_.load(std::memory_order_acquire); }  // pairs with note
    /// The first one counts.
    void note(const char* text) {
      const std::lock_guard lock(mutex_);
      if (happened_.load(std::memory_order_relaxed)) return;  // relaxed: set under the mutex
      text_ = text;
      at_ = Clock::now();
      happened_.store(true,
                      std::memory_order_release);  // pairs with has_happened: text and time do not change after it
    }
    /// Once it has happened.
    const std::string& text() const { return text_; }
    Clock::time_point at() const { return at_; }

   private:
    std::mutex mutex_;
    std::string text_;
    Clock::time_point at_;
    std::atomic<bool> happened_ = false;
  };

  bool has_failed() const { return failure_ != nullptr && failure_->has_happened(); }

  template <class Function>
  void attempt(Function&& call) {
    if (has_failed()) return;
    try {
      call();
    } catch (const Error& error) {
      if (failure_ == nullptr) throw;
      failure_->note(error.what());
    }
  }

  void share_watch(const MpiTransport& parent, std::span<const int> ranks) {
    if (parent.watch_ == nullptr) return;
    watch_ = parent.watch_;
    failure_ = parent.failure_;
    reported_.resize(ranks.size());
    for (const int rank : ranks) watched_as_.push_back(parent.watched_as_[static_cast<std::size_t>(rank)]);
  }

  int member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  int mpi_source(int source) const { return source == kAnySource ? library_->facts().any_source : member(source); }
  int own(int tag) const { return tag + static_cast<int>(number_) * tags::kEnd; }
  // The inverse of `member` and `own`: MPI knows the ranks of the communicator and the tags of all its groups.
  Envelope in_group(const MpiLibrary::Status& status) const {
    return {rank_of_[static_cast<std::size_t>(status.source)], status.tag - own(0)};
  }

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<MpiLibrary> library_;
  MpiLibrary::Handle comm_;
  std::uint32_t number_;      // among the groups of this communicator
  std::vector<int> members_;  // by rank of the group, ranks of the communicator
  std::vector<int> rank_of_;  // the inverse
  int rank_ = -1;
  std::size_t max_message_ = kMaxMessage;
  std::shared_ptr<PeerWatch> watch_ = nullptr;
  std::vector<std::size_t> watched_as_ = {};  // by rank
  std::vector<bool> reported_ = {};
  std::shared_ptr<Failure> failure_ = nullptr;  // of MPI, for all groups of a watched world
  bool asks_ = false;                           // nothing is asked of the watch before this rank has waited for long
  bool holds_memory_ = false;                   // MPI has not ended a receive that was given up
};

}  // namespace

void watch_ranks(ExchangeCommunicator& world, std::shared_ptr<PeerWatch> watch) {
  ProgressEngine& engine = *world.engine_of_group();
  // A Transport is not thread-safe, and other threads may wait in this group already.
  const std::lock_guard lock(engine.mutex());
  engine.transport().set_watch(std::move(watch));
}

std::shared_ptr<Communicator> open_mpi_world(std::shared_ptr<MpiLibrary> library, const ExchangeOptions& options,
                                             const Deadline& deadline) {
  const MpiLibrary::Handle world = library->facts().comm_world;
  const MpiLibrary::Handle comm = duplicate(*library, world, deadline);
  auto channel = std::make_shared<Channel>(std::move(library), comm);
  return std::make_shared<ExchangeCommunicator>(std::make_unique<MpiTransport>(std::move(channel)), options);
}

}  // namespace samestep
