#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "nccl/nccl_operation.h"
#include "waiting/backoff.h"

// How a communicator ends. All that may block is done by the watching thread, for which others wait until a deadline.

namespace samestep {
namespace {

constexpr Seconds kPatience{5.0};  // of a group that is dropped, for NCCL to end
constexpr std::chrono::seconds kForCallsToReturn{1};

}  // namespace

void NcclComm::fail(std::exception_ptr error, bool tell) {
  if (broken_) return;  // the first error is the cause; those that follow are consequences
  broken_ = error;
  changed_.notify_all();
  // First, because a thread that sees the error may end the process. The rank that raised has notified all others of a
  // block that ends, and this one revokes the group as its consequence.
  if (tell && !is_a<StepError>(error)) {
    const std::string reason = text_of(error);
    signature_check_->abandon(error, reason);
    host_->abandon(error, reason);
  }
  // On a mismatch the watching thread first ends the other communicators, so that no caller can start anything there.
  if (!has_watcher_ || !is_mismatch(error) || !on_mismatch_) end_operations();
}

void NcclComm::end_operations() {
  for (const auto& operation : pending_) operation->finish(broken_);
}

void NcclComm::release() {
  std::shared_ptr<NcclComm> self = weak_from_this().lock();  // null in the destructor: then nobody makes calls
  std::unique_lock lock(mutex_);
  if (broken_ && is_mismatch(broken_) && on_mismatch_ && self != nullptr) {
    // Without the mutex: the callback abandons all communicators of the group, this one included.
    const auto tell = std::exchange(on_mismatch_, nullptr);
    const std::exception_ptr error = broken_;
    lock.unlock();
    tell(error);
    lock.lock();
  }
  changed_.wait(lock, [this] { return !starting_; });  // which ends soon, because it looks at `broken_`
  const bool aborts = broken_ != nullptr, calls_block = calls_block_;
  if (aborts) end_operations();
  const std::list<std::shared_ptr<Operation>> ended = std::exchange(pending_, {});
  queue_.clear();
  std::shared_ptr<NcclMembers> members = members_;
  const std::shared_ptr<std::promise<void>> released = released_;
  watcher_has_left_ = true;
  changed_.notify_all();
  lock.unlock();
  // From here on NCCL may block for as long as the device does, and only what is shared may be used, or `self`.
  if (aborts) {
    // An abort of the parent interrupts calls on the child. The child may be aborted only when nobody is inside of NCCL
    // with it.
    members->abort_parents();
    if (self != nullptr) {
      lock.lock();
      const auto returned = [this] { return !launching_; };
      if (calls_block) {
        changed_.wait(lock, returned);
      } else {  // where calls may wait for the device, only this ends them
        changed_.wait_for(lock, kForCallsToReturn, returned);
      }
      lock.unlock();
    }
    members->abort();
  } else {
    members->destroy();
  }
  for (const auto& operation : ended) operation->memory.clear();  // only now does the device use it no more
  members.reset();
  released->set_value();
}

bool NcclComm::stop(const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (!watcher_.joinable()) return true;
  // A thread cannot join itself.
  if (watcher_.get_id() == std::this_thread::get_id()) {  // its own callback dropped the last pointer
    watcher_.detach();
    return true;
  }
  Backoff pause(/*oversubscribed=*/true);
  while (is_released_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (deadline.passed()) {
      watcher_.detach();
      return false;
    }
    pause.step();
  }
  watcher_.join();
  return true;
}

void NcclComm::close(const Deadline& deadline) {
  Backoff pause(/*oversubscribed=*/true);
  bool whole = false;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      whole = !broken_ && !ending_;
      if (!whole || (pending_.empty() && queue_.empty() && !launching_ && !starting_)) break;
    }
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", host_->name(), "' are pending"));
    if (pause.step()) wait_hooks().interrupt();
  }
  if (whole) {
    try {
      signature_check_->start({CollectiveType::barrier})->wait(deadline);  // peers may still need this rank
    } catch (const Error&) {
      abandon(std::current_exception());
    }
  }
  const bool stopped = stop(deadline);
  for (const Communicator::WorkPtr& receive : liveness_receives_) receive->cancel();
  if (!stopped) {
    throw TimeoutError(str("close: NCCL of group '", host_->name(), "' has not ended after ",
                           deadline.timeout().count(), " s: it waits for the device, or for another rank"));
  }
}

bool NcclComm::device_has_ended() const {
  return is_released_.wait_for(std::chrono::seconds(0)) == std::future_status::ready && members_->have_ended();
}

void NcclComm::wait_for_device(const Deadline& deadline) const {
  {
    const std::lock_guard lock(mutex_);
    if (!has_watcher_) return;  // no operation has started
  }
  Backoff pause(/*oversubscribed=*/true);
  while (!device_has_ended() && !deadline.passed()) pause.step();
}

NcclComm::~NcclComm() {
  std::unique_lock lock(mutex_);
  if (!ending_) fail(std::make_exception_ptr(NotInitializedError("the group was dropped")), /*tell=*/false);
  // The host may still write to it.
  if (address_ != nullptr && !address_->done()) new std::shared_ptr<Invitation>(invitation_);
  ending_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !has_watcher_ || watcher_has_left_; });
  lock.unlock();
  stop(Deadline::after(kPatience));
}

}  // namespace samestep
