#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "nccl/nccl_operation.h"

// How a channel finds out that something has gone wrong.

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2};
constexpr Seconds kLookAtPeersAfter{0.05};  // an operation that takes longer may wait for one that has gone
constexpr Seconds kGrace{1.0};  // for the host to learn who has gone, when NCCL only knows that somebody has

}  // namespace

std::exception_ptr NcclComm::lost_peer() {
  // Every wait in a group checks its peers now and then, but nobody may be waiting in this one.
  signature_check_->membership().check_peers();
  for (const Communicator::WorkPtr& receive : liveness_receives_) {
    if (!receive->done() || !receive->error()) continue;
    // The text begins with the receive that failed, of which the user knows nothing.
    const std::string text = text_of(receive->error()), about_receive = "): ";
    const std::size_t cut = text.find(about_receive);
    const std::string who = cut == std::string::npos ? text : text.substr(cut + about_receive.size());
    return std::make_exception_ptr(PeerLostError(str("device operations of group '", host_->name(), "': ", who)));
  }
  return nullptr;
}

// A mismatch first: a rank that has raised because of it may have left already.
std::exception_ptr NcclComm::host_cause() {
  for (const auto& operation : pending_) {
    const bool differs =
        operation->signature_check && operation->signature_check->done() && operation->signature_check->error();
    if (differs) return operation->signature_check->error();
  }
  return lost_peer();
}

std::exception_ptr NcclComm::timeout_error(const Operation& operation, const Deadline& deadline,
                                           const std::string& missing) {
  const std::string text = str(operation.what, " (device operation ", operation.sequence, " of group '", host_->name(),
                               "') has not ended after ", deadline.timeout().count(), " s: ");
  // Without a comparison nobody knows whether the other ranks have come.
  if (operation.signature_check == nullptr) {
    return std::make_exception_ptr(
        TimeoutError(text + "the device has not finished it, or not all ranks have reached it"));
  }
  if (operation.signature_check->done() &&
      !operation.signature_check->error()) {  // who waits for it may have given it up
    return std::make_exception_ptr(
        TimeoutError(text + "all ranks have started it, but the device has not finished it"));
  }
  return std::make_exception_ptr(TimeoutError(text + "not all ranks have reached it" + missing));
}

std::exception_ptr NcclComm::check_operation(Operation& operation, Clock::time_point now) {
  if (operation.ended || comm_ == nullptr) return operation.error;
  const bool agreed = operation.signature_check == nullptr || operation.signature_check->done();
  if (agreed && operation.signature_check != nullptr && operation.signature_check->error())
    return operation.signature_check->error();
  // The event has not been recorded yet, and an event without a record counts as complete.
  if (!operation.launched) {  // the thread that launches it checks the others, unless a call blocks
    const bool late = now - operation.started > operation.deadline.timeout() + kGrace;
    return late ? timeout_error(operation, operation.deadline, "") : nullptr;
  }
  // Both: an operation has not succeeded before it is known that all ranks have called the same one.
  if (agreed && operation.end->is_complete()) {
    if (launching_) return nullptr;  // that thread asks NCCL for its state
    if (const int state = extra_.state(comm_).state; state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) {
      operation.finish(nullptr);
    }
    return nullptr;
  }
  if (operation.deadline.passed()) return timeout_error(operation, operation.deadline, "");
  if (now - operation.started < kLookAtPeersAfter) return nullptr;
  return lost_peer();
}

void NcclComm::poll() {
  std::unique_lock lock(mutex_);
  if (broken_ || comm_ == nullptr) return;
  const Clock::time_point now = Clock::now();
  try {
    const OnDevice on(gpu(), options_.device);
    using CommState = ExtraDevices::CommState;
    // While a thread launches it is inside of NCCL, and looks at the state itself.
    const auto [state, comm] = launching_ ? CommState{nccl_abi::kInProgress, comm_} : extra_.state(comm_);
    if (state != nccl_abi::kSuccess && state != nccl_abi::kInProgress) {
      const std::string text = str("NCCL in group '", host_->name(), "': ", nccl().explain(state, comm));
      // NCCL only knows that something is wrong; the host soon knows what.
      std::exception_ptr cause = host_cause();
      for (const Deadline grace = Deadline::after(kGrace); !cause && !grace.passed(); cause = host_cause()) {
        lock.unlock();
        std::this_thread::sleep_for(kLookEvery);
        lock.lock();
        if (broken_ || comm_ == nullptr) return;
      }
      fail(cause ? cause : std::make_exception_ptr(Error(text)), /*tell=*/!cause || !is_mismatch(cause));
      return;
    }
    for (const auto& operation : pending_) {
      if (const std::exception_ptr error = check_operation(*operation, now)) {
        fail(error, /*tell=*/!is_mismatch(error));
        return;
      }
    }
  } catch (const Error&) {  // of the runtime: the device is lost
    fail(std::current_exception(), /*tell=*/true);
    return;
  }
  // pairs with NcclOperation::finish: the error is visible
  pending_.remove_if([](const auto& operation) { return operation->ended.load(); });
}

void NcclComm::watch() {
  bind_thread_to_device(gpu(), options_.device);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      // Sleeps while nothing is outstanding, so that idle groups cost nothing.
      changed_.wait(lock, [this] { return ending_ || broken_ || !pending_.empty(); });
      if (ending_ || broken_) break;
    }
    poll();
    std::this_thread::sleep_for(kLookEvery);
  }
  const std::shared_ptr<NcclComm> self = weak_from_this().lock();  // the callback may drop this object
  std::function<void(const std::exception_ptr&)> tell;
  NcclLibrary::Comm comm = nullptr;
  std::list<std::shared_ptr<Operation>> ended;
  std::unique_lock lock(mutex_);
  if (!broken_) return;
  if (is_mismatch(broken_)) std::swap(tell, on_mismatch_);
  // Without the mutex: the callback abandons all communicators of the group, this one included.
  if (tell && self != nullptr) {
    const std::exception_ptr error = broken_;
    lock.unlock();
    tell(error);
    lock.lock();
  }
  end_operations();
  // A thread that launches looks at `broken_` between its calls, unless one blocks: then only the abort lets it go on.
  changed_.wait_for(lock, kGrace, [this] { return !launching_; });
  std::swap(comm, comm_);
  std::swap(ended, pending_);
  lock.unlock();
  // Without the mutex: an abort may wait for the device, and callers must not wait with it.
  extra_.abort(comm);
  for (const auto& operation : ended) operation->memory.clear();  // only now does the device use it no more
}

}  // namespace samestep
