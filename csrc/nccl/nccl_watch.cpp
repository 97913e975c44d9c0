#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "nccl/nccl_operation.h"

// How a communicator finds out that something has gone wrong.

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2};
constexpr Seconds kLookAtPeersAfter{0.05};  // an operation that takes longer may wait for one that has gone
// For the host to learn who has gone, when NCCL only knows that somebody has; and for the device to finish an operation
// that ranks which have gone may have finished.
constexpr Seconds kGrace{1.0};

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
    const std::string of_devices = str("device operations of group '", host_->name(), "': ", who);
    // A rank that has left because of an exception in a block of together() has not been lost: the class tells the end
    // of the block that this error is a consequence.
    if (is_a<StepError>(receive->error())) return std::make_exception_ptr(StepError(of_devices));
    return std::make_exception_ptr(PeerLostError(of_devices));
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
  // Without a comparison nobody knows whether the other ranks have arrived.
  if (operation.signature_check == nullptr) {
    return std::make_exception_ptr(
        TimeoutError(text + "the device has not finished it, or not all ranks have reached it"));
  }
  if (operation.signature_check->done() &&
      !operation.signature_check->error()) {  // who waits for it may have given it up
    return std::make_exception_ptr(
        TimeoutError(text + (operation.launched ? "all ranks have started it, but the device has not finished it"
                                                : "all ranks have called it, but NCCL has not connected them")));
  }
  return std::make_exception_ptr(TimeoutError(text + "not all ranks have reached it" + missing));
}

std::exception_ptr NcclComm::check_operation(Operation& operation, Clock::time_point now) {
  if (operation.ended) return operation.error;
  // Both: an operation has not succeeded before it is known that all ranks have called the same one.
  const bool agreed = operation.signature_check == nullptr || operation.signature_check->done();
  if (agreed && operation.signature_check != nullptr && operation.signature_check->error())
    return operation.signature_check->error();
  if (agreed && operation.completed) {
    if (launching_ && !calls_block_) return nullptr;  // that thread asks NCCL for its state
    if (const int state = members_->state().state; state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) {
      operation.finish(nullptr);
    }
    return nullptr;
  }
  if (operation.deadline.passed()) return timeout_error(operation, operation.deadline, "");
  if (now - operation.started < kLookAtPeersAfter) return nullptr;
  const std::exception_ptr lost = lost_peer();
  if (!lost || !agreed || !operation.launched) return lost;
  // All ranks have called it. A rank that has left may have its result, and this device may soon have its own.
  if (operation.peer_lost_at == Clock::time_point{}) operation.peer_lost_at = now;
  return now - operation.peer_lost_at < kGrace ? nullptr : lost;
}

void NcclComm::ask_device(Operation& operation) {
  if (!operation.launched || operation.completed) return;
  const std::unique_lock alone(asking_, std::try_to_lock);
  if (alone && operation.end->is_complete()) operation.completed = true;
}

void NcclComm::check_all(std::unique_lock<std::mutex>& lock) {
  const Clock::time_point now = Clock::now();
  // While NCCL starts, who starts it looks, and before 2.18 who launches. To ask reads variables of NCCL, and under the
  // mutex no other thread ends the communicator meanwhile.
  const bool looks = started_ && (calls_block_ || !launching_);
  const auto [state, comm] = looks ? members_->state() : NcclMembers::CommState{nccl_abi::kSuccess, nullptr};
  if (state != nccl_abi::kSuccess && state != nccl_abi::kInProgress) {
    const std::string text = str("NCCL in group '", host_->name(), "': ", nccl().explain(state, comm));
    // NCCL only knows that something is wrong; the host soon knows what.
    std::exception_ptr cause = host_cause();
    for (const Deadline grace = Deadline::after(kGrace); !cause && !grace.passed(); cause = host_cause()) {
      lock.unlock();
      std::this_thread::sleep_for(kLookEvery);
      lock.lock();
      if (broken_) return;
    }
    return fail(cause ? cause : std::make_exception_ptr(Error(text)), /*tell=*/!cause || !is_mismatch(cause));
  }
  for (const auto& operation : pending_) {
    if (const std::exception_ptr error = check_operation(*operation, now)) {
      return fail(error, /*tell=*/!is_mismatch(error));
    }
  }
}

void NcclComm::poll() {
  std::vector<std::shared_ptr<Operation>> outstanding;  // dropped without the mutex: that may free device memory
  std::unique_lock lock(mutex_);
  outstanding.assign(pending_.begin(), pending_.end());
  lock.unlock();
  std::exception_ptr lost;
  try {
    for (const auto& operation : outstanding) {  // which end in their order
      ask_device(*operation);
      if (!operation->completed) break;
    }
  } catch (const Error&) {  // of the runtime: the device is lost
    lost = std::current_exception();
  }
  lock.lock();
  if (broken_) return;
  if (lost) return fail(lost, /*tell=*/true);
  try {
    check_all(lock);
  } catch (const Error&) {
    fail(std::current_exception(), /*tell=*/true);
  }
  if (broken_) return;
  // pairs with Operation::finish: the error is visible
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
  release();
}

}  // namespace samestep
