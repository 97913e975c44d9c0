#include "mpi/mpi_communicator.h"

#include <atomic>
#include <numeric>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/exchange_communicator.h"
#include "exchange/messenger.h"
#include "exchange/tags.h"
#include "exchange/waiting.h"

namespace samestep {
namespace {

constexpr Seconds kBlameAfter{15};  // longer than it takes to find out who has died

std::atomic<bool> has_lost_ranks = false;

/// A duplicate of a communicator, without blocking in MPI.
MpiLibrary::Handle duplicate(MpiLibrary& library, MpiLibrary::Handle comm, const Deadline& deadline) {
  static std::vector<std::unique_ptr<MpiLibrary::Handle>> late;  // MPI writes to it when it pleases
  auto made = std::make_unique<MpiLibrary::Handle>(0);
  MpiLibrary::Handle request = library.duplicate(comm, *made);
  MpiLibrary::Status status;
  Pause pause(/*oversubscribed=*/true);
  while (!library.test(request, status)) {
    if (!pause.step()) continue;
    if (deadline.passed()) {
      late.push_back(std::move(made));
      throw TimeoutError(str("initialize: not all ", library.size(comm),
                             " ranks of the MPI world have called it after ", deadline.timeout().count(), " s"));
    }
    wait_hooks().interrupt();
  }
  return *made;
}

class MpiMessenger final : public Messenger {
 public:
  MpiMessenger(std::shared_ptr<MpiLibrary> library, MpiLibrary::Handle comm, std::size_t max_message)
      : library_(std::move(library)),
        comm_(comm),
        rank_(library_->rank(comm)),
        size_(library_->size(comm)),
        max_message_(max_message) {
    library_->return_errors(comm);
  }
  MpiMessenger(const MpiMessenger& parent, MpiLibrary::Handle comm, std::span<const int> ranks)
      : MpiMessenger(parent.library_, comm, parent.max_message_) {
    if (parent.watch_ == nullptr) return;
    watch_ = parent.watch_;
    failure_ = parent.failure_;
    reported_.resize(ranks.size());
    for (const int rank : ranks) watched_as_.push_back(parent.watched_as_[static_cast<std::size_t>(rank)]);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view engine() const override { return "mpi"; }
  std::size_t max_message() const override { return max_message_; }

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override {
    Request request;
    attempt([&] { request = {library_->send(comm_, data, static_cast<int>(nbytes), dest, tag), true}; });
    return request;
  }

  Request receive(void* data, std::size_t capacity, int source, int tag) override {
    Request request{0, true};  // which never ends if MPI fails
    attempt(
        [&] { request.bits = library_->receive(comm_, data, static_cast<int>(capacity), mpi_source(source), tag); });
    return request;
  }

  bool test(Request& request, Envelope* envelope) override {
    if (!request.active) return true;
    if (has_failed() && Clock::now() - failure_->at > kBlameAfter) throw Error(failure_->text);
    MpiLibrary::Status status;
    bool ended = false;
    attempt([&] { ended = library_->test(request.bits, status); });
    if (!ended) return false;
    request.active = false;
    if (envelope != nullptr) *envelope = {status.source, status.tag};
    return true;
  }

  bool cancel(Request& request) override {
    if (!request.active || library_->finalized() || has_failed()) return false;
    const bool cancelled = library_->cancel(request.bits);
    request.active = request.bits != library_->facts().request_null;
    return cancelled;
  }

  bool probe(int tag, Envelope& envelope) override {
    MpiLibrary::Status status;
    bool found = false;
    attempt([&] { found = library_->probe(comm_, library_->facts().any_source, tag, status); });
    if (found) envelope = {status.source, status.tag};
    return found;
  }

  std::unique_ptr<Messenger> subset(std::span<const int> ranks) override {
    const std::vector<int> list(ranks.begin(), ranks.end());
    const MpiLibrary::Handle comm = library_->create_group(comm_, list, tags::kTransportMakesGroup);
    return std::make_unique<MpiMessenger>(*this, comm, ranks);
  }

  void set_watch(std::shared_ptr<PeerWatch> watch) override {
    watch_ = std::move(watch);
    failure_ = std::make_shared<Failure>();
    reported_.resize(static_cast<std::size_t>(size_));
    watched_as_.resize(reported_.size());
    std::iota(watched_as_.begin(), watched_as_.end(), std::size_t{0});
  }

  void ask_after(int peer) override {
    if (watch_ == nullptr || peer == rank_) return;
    asks_ = true;
    watch_->ask_after(watched_as_[static_cast<std::size_t>(peer)]);
  }

  std::vector<Loss> losses() override {
    std::vector<Loss> found;
    for (int peer = 0; has_failed() && peer < size_; ++peer) ask_after(peer);
    for (int peer = 0; asks_ && peer < size_; ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      if (reported_[i] || peer == rank_) continue;
      const std::string why = watch_->death(watched_as_[i]);
      reported_[i] = !why.empty();
      if (reported_[i]) {
        has_lost_ranks = true;
        found.push_back({peer, 0, why});
      }
    }
    return found;
  }

  void close() override {
    watch_ = nullptr;
    asks_ = false;
    if (!library_->finalized() && !has_failed()) library_->free(comm_);
  }

 private:
  /// What MPI does when a rank has died is its own affair: it may return errors, or crash at the next call. So where
  /// deaths are known otherwise it is left alone after its first error, until it is known who has died.
  struct Failure {
    std::string text;
    Clock::time_point at;
  };

  bool has_failed() const { return failure_ != nullptr && !failure_->text.empty(); }

  template <class Call>
  void attempt(Call&& call) {
    if (has_failed()) return;
    try {
      call();
    } catch (const Error& error) {
      if (failure_ == nullptr) throw;
      *failure_ = {error.what(), Clock::now()};
    }
  }

  int mpi_source(int source) const { return source == kAnySource ? library_->facts().any_source : source; }

  std::shared_ptr<MpiLibrary> library_;
  MpiLibrary::Handle comm_;
  int rank_;
  int size_;
  std::size_t max_message_;
  std::shared_ptr<PeerWatch> watch_ = nullptr;
  std::vector<std::size_t> watched_as_ = {};  // by rank
  std::vector<bool> reported_ = {};
  std::shared_ptr<Failure> failure_ = nullptr;  // of MPI, for all groups of a watched world
  bool asks_ = false;                           // nothing is asked of the watch before this rank has waited for long
};

}  // namespace

bool mpi_has_lost_ranks() { return has_lost_ranks; }

void watch_ranks(Communicator& world, std::shared_ptr<PeerWatch> watch) {
  auto* const exchange = dynamic_cast<ExchangeCommunicator*>(&world);
  if (exchange == nullptr) throw InvalidArgumentError("watch_ranks: this group sends no messages");
  Engine& engine = *exchange->engine_of_group();
  const std::lock_guard lock(engine.mutex());
  engine.messenger().set_watch(std::move(watch));
}

std::shared_ptr<Communicator> open_mpi_world(std::shared_ptr<MpiLibrary> library, const MpiOptions& options,
                                             const Deadline& deadline) {
  constexpr std::size_t kMaxMessage = std::size_t{1} << 30;
  const MpiLibrary::Handle world = library->facts().comm_world;
  const MpiLibrary::Handle comm = duplicate(*library, world, deadline);
  auto messenger =
      std::make_unique<MpiMessenger>(std::move(library), comm, options.max_message ? options.max_message : kMaxMessage);
  return std::make_shared<ExchangeCommunicator>(std::move(messenger), options.exchange);
}

}  // namespace samestep
