#include "mpi/mpi_communicator.h"

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

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view engine() const override { return "mpi"; }
  std::size_t max_message() const override { return max_message_; }

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override {
    return {library_->send(comm_, data, static_cast<int>(nbytes), dest, tag), true};
  }

  Request receive(void* data, std::size_t capacity, int source, int tag) override {
    return {library_->receive(comm_, data, static_cast<int>(capacity), mpi_source(source), tag), true};
  }

  bool test(Request& request, Envelope* envelope) override {
    if (!request.active) return true;
    MpiLibrary::Status status;
    if (!library_->test(request.bits, status)) return false;
    request.active = false;
    if (envelope != nullptr) *envelope = {status.source, status.tag};
    return true;
  }

  bool cancel(Request& request) override {
    if (!request.active || library_->finalized()) return false;
    const bool cancelled = library_->cancel(request.bits);
    request.active = request.bits != library_->facts().request_null;
    return cancelled;
  }

  bool probe(int tag, Envelope& envelope) override {
    MpiLibrary::Status status;
    if (!library_->probe(comm_, library_->facts().any_source, tag, status)) return false;
    envelope = {status.source, status.tag};
    return true;
  }

  std::unique_ptr<Messenger> subset(std::span<const int> ranks) override {
    const std::vector<int> list(ranks.begin(), ranks.end());
    const MpiLibrary::Handle comm = library_->create_group(comm_, list, tags::kTransportMakesGroup);
    return std::make_unique<MpiMessenger>(library_, comm, max_message_);
  }

  void close() override {
    if (!library_->finalized()) library_->free(comm_);
  }

 private:
  int mpi_source(int source) const { return source == kAnySource ? library_->facts().any_source : source; }

  std::shared_ptr<MpiLibrary> library_;
  MpiLibrary::Handle comm_;
  int rank_;
  int size_;
  std::size_t max_message_;
};

}  // namespace

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
