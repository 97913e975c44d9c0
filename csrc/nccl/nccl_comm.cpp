#include "nccl/nccl_comm.h"

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "nccl/nccl_operation.h"
#include "waiting/backoff.h"

// How a communicator is made, is used and ends. All that may block in its end is done by the watching thread, for which
// others wait until a deadline.

namespace samestep {
namespace {

constexpr Seconds kPatience{5.0};   // of a group that is dropped, for NCCL to end
constexpr Seconds kForGraphs{2.0};  // of one whose operations graphs may hold: NCCL waits for their end

}  // namespace

NcclComm::NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check)
    : options_(std::move(options)),
      host_(std::move(host)),
      signature_check_(std::move(signature_check)),
      queue_(LaunchQueue::of(*options_.gpu, options_.device)),
      member_(std::make_shared<NcclMember>(options_.gpu, options_.nccl, options_.device)),
      log_(signature_check_, host_->name()) {}

std::string NcclLaunch::describe() const {
  return str(name(type), " of ", count, is_list ? " arrays of " : " ", name(dtype), " on the device");
}

std::shared_ptr<NcclComm> NcclComm::make(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check) {
  return std::shared_ptr<NcclComm>(new NcclComm(std::move(options), std::move(host), std::move(signature_check)));
}

std::shared_ptr<NcclComm> NcclComm::open(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check, const Deadline& deadline) {
  std::shared_ptr<NcclComm> made = make(std::move(options), std::move(host), std::move(signature_check));
  try {
    made->prepare();
    wait_hooks().run_without_gil([&] { made->start_nccl([deadline] { return deadline; }); });
    // NCCL may have failed on some ranks only. Those have abandoned the group, so this fails on all of them.
    made->signature_check_->start({CollectiveType::barrier})->wait(deadline);
  } catch (...) {
    const std::lock_guard lock(made->mutex_);
    made->fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  return made;
}

void NcclComm::throw_if_broken() const {
  if (broken_) {
    unheard_ = false;
    std::rethrow_exception(broken_);
  }
  if (ending_ || closing_) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

void NcclComm::prepare() {
  owner_.require(host_->rank(), host_->name());
  {
    const std::lock_guard lock(mutex_);
    throw_if_broken();
  }
  std::call_once(prepared_, [this] {
    const OnDevice on(gpu(), options_.device);
    auto address = std::make_unique<NcclAddress>(nccl(), *signature_check_);
    const std::lock_guard lock(mutex_);
    throw_if_broken();
    address_ = std::move(address);
    liveness_ = std::make_unique<const PeerLiveness>(signature_check_, host_->name());
    has_watcher_ = true;
    watcher_ = std::thread([this] { watch(); });
  });
}

std::shared_ptr<NcclComm::Operation> NcclComm::enqueue(NcclLaunch launch) {
  prepare();
  // The deadline is the group's, because the caller may never wait for this operation on the host.
  auto operation = std::make_shared<Operation>(std::move(launch), Deadline::after(options_.timeout));
  watch_from_now(operation);
  wait_hooks().run_without_gil([&] {
    if (operation->launch.where == NcclLaunch::Where::own_stream) {
      try {
        // As the streams are now, whenever NCCL is called.
        operation->after = member_->events().record(operation->launch.after);
      } catch (const Error&) {
        const std::lock_guard lock(mutex_);
        fail(std::current_exception(), /*tell=*/true);
      }
    }
    queue_.add([self = shared_from_this(), operation] { self->begin(operation); }, waits_for_nobody(*operation));
  });
  return operation;
}

std::shared_ptr<Work> NcclComm::launch(NcclLaunch launch) {
  // Also if it has failed already: `wait` throws its error, and the work keeps the arrays that NCCL may be using.
  return work_on(enqueue(std::move(launch)));
}

void NcclComm::compare(const Signature& signature) {
  prepare();
  constexpr Seconds kAlways{1e9};  // nobody waits for it
  NcclLaunch none{.type = signature.type, .dtype = signature.dtype, .count = 0, .compared = signature};
  const auto operation = std::make_shared<Operation>(std::move(none), Deadline::after(kAlways));
  operation->launched = operation->completed = true;
  watch_from_now(operation);
}

void NcclComm::abandon(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (broken_) return;
  fail(std::move(error), /*tell=*/false);
  unheard_ = false;  // who abandons knows why
}

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
  end_operations();
}

void NcclComm::end_operations() {
  // Of a rank that has gone the others learn as they close, and it is no error there.
  const bool is_heard = is_a<PeerLostError>(broken_);
  for (const auto& operation : pending_) {
    const bool had_returned = operation->launched && operation->launch.where == NcclLaunch::Where::in_stream;
    unheard_ = unheard_ || (!is_heard && had_returned && !operation->ended);
    operation->finish(broken_);
  }
}

void NcclComm::release() {
  std::shared_ptr<NcclComm> self = weak_from_this().lock();  // null in the destructor: then nobody makes calls
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !starting_; });  // which ends soon, because it looks at `broken_`
  const bool aborts = broken_ != nullptr;
  if (aborts) end_operations();
  const std::list<std::shared_ptr<Operation>> ended = std::exchange(pending_, {});
  std::vector<std::shared_ptr<void>> for_graphs = std::exchange(for_graphs_, {});
  std::shared_ptr<NcclMember> member = member_;
  const std::shared_ptr<std::promise<void>> released = released_;
  watcher_has_left_ = true;
  changed_.notify_all();
  lock.unlock();
  // From here on NCCL may block for as long as the device does, and only what is shared may be used, or `self`.
  if (aborts) {
    // An abort of the parent interrupts calls on the child. The child may be aborted only when nobody is inside of NCCL
    // with it.
    member->abort_parent();
    if (self != nullptr) {
      lock.lock();
      changed_.wait(lock, [this] { return !launching_; });
      lock.unlock();
    }
    member->abort();
  } else {
    member->destroy();
  }
  for (const auto& operation : ended) operation->launch.memory.clear();  // only now does the device use it no more
  for_graphs.clear();
  member.reset();
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
      if (!whole || pending_.empty()) {
        closing_ = true;  // else another thread might launch what NCCL would wait for at its end
        break;
      }
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
  const PeerLiveness* liveness = nullptr;
  bool captured = false;
  {
    const std::lock_guard lock(mutex_);
    liveness = liveness_.get();
    captured = captured_;
  }
  const Deadline for_graphs = Deadline::after(kForGraphs);
  const bool stopped = stop(captured && deadline.is_later_than(for_graphs) ? for_graphs : deadline);
  if (liveness != nullptr) liveness->end();
  if (!stopped && captured && !deadline.passed()) {
    wait_hooks().warn(str("group '", host_->name(),
                          "' is closed, but CUDA graphs that hold its operations still exist: NCCL keeps its memory, "
                          "and they must not be launched any more. Delete them before close()"));
  } else if (!stopped) {
    throw TimeoutError(str("close: NCCL of group '", host_->name(), "' has not ended after ",
                           deadline.timeout().count(), " s: it waits for the device, or for another rank"));
  }
}

std::exception_ptr NcclComm::unheard() const {
  const std::lock_guard lock(mutex_);
  return unheard_ ? broken_ : nullptr;
}

bool NcclComm::device_has_ended() const {
  return is_released_.wait_for(std::chrono::seconds(0)) == std::future_status::ready && member_->has_ended();
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
  ending_ = true;
  changed_.notify_all();
  if (watcher_.get_id() == std::this_thread::get_id() && !watcher_has_left_) {  // it dropped the last pointer
    lock.unlock();
    release();
    lock.lock();
    *destroyed_by_watcher_ = true;
  }
  // Not for long: a watching thread that makes calls which may block keeps this object, or uses it no more.
  changed_.wait(lock, [this] { return !has_watcher_ || watcher_has_left_; });
  lock.unlock();
  stop(Deadline::after(kPatience));
}

}  // namespace samestep
