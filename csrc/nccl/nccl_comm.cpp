#include "nccl/nccl_comm.h"

#include <array>
#include <cassert>

#include "core/error.h"
#include "core/format.h"
#include "process/wait_hooks.h"
#include "waiting/await.h"

// How a communicator is made, is used and ends. All that may block in its end is done by the watching thread, for which
// others wait until a deadline.

namespace samestep {
namespace {

constexpr Seconds kPatience{5.0};   // of a group that is dropped, for NCCL to end
constexpr Seconds kToNotice{0.2};   // for the watching thread to notice that, unless it is in a call that blocks
constexpr Seconds kToAsk{0.05};     // for another thread to ask the device, before operations end with an error
constexpr Seconds kForGraphs{2.0};  // of one whose operations graphs may hold: NCCL waits for their end

}  // namespace

NcclComm::NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check)
    : options_(std::move(options)),
      host_(std::move(host)),
      signature_check_(std::move(signature_check)),
      queue_(LaunchQueue::of(*options_.gpu, options_.device)),
      member_(options_.gpu, options_.nccl, options_.device),
      log_(signature_check_, host_->name()) {}

std::string NcclLaunch::describe() const {
  const auto& [type, dtype, op, root, shape] = compared;
  return is_list ? str(name(type), " of ", shape.extents[0], " arrays of ", name(dtype), " on the device")
                 : compared.describe() + " on the device";
}

std::shared_ptr<NcclComm> NcclComm::make(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check) {
  std::shared_ptr<NcclComm> made(new NcclComm(std::move(options), std::move(host), std::move(signature_check)));
  // Let go of at the end, because `user_` keeps the deleter for as long as it lives.
  const std::shared_ptr<NcclComm> user(made.get(), [made](NcclComm*) mutable { std::exchange(made, nullptr)->drop(); });
  made->user_ = user;
  return user;
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
    made->fail(std::current_exception());
    throw;
  }
  return made;
}

void NcclComm::throw_if_broken() const {
  if (broken_) {
    unheard_ = nullptr;
    std::rethrow_exception(broken_);
  }
  if (state_ == State::closing || is_over()) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

void NcclComm::prepare() {
  owner_.require(host_->rank(), host_->name());
  std::call_once(prepared_, [this] {
    std::unique_lock lock(mutex_);
    throw_if_broken();
    lock.unlock();
    const OnDevice on(gpu(), options_.device);
    auto address = std::make_unique<NcclAddress>(nccl(), *signature_check_);
    lock.lock();
    throw_if_broken();
    address_ = std::move(address);
    watcher_ = std::thread([self = shared_from_this()] { self->watch(); });
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
        operation->after = member_.events().record(operation->launch.after);
      } catch (const Error&) {
        const std::lock_guard lock(mutex_);
        fail(std::current_exception());
      }
    }
    queue_.add([self = user_.lock(), operation] { self->begin(operation); }, waits_for_nobody(*operation));
  });
  return operation;
}

void NcclComm::compare(const Signature& signature) {
  prepare();
  constexpr Seconds kAlways{1e9};  // nobody waits for it
  const auto operation = std::make_shared<Operation>(NcclLaunch{.compared = signature}, Deadline::after(kAlways));
  operation->launched = operation->completed = true;
  watch_from_now(operation);
}

void NcclComm::abandon(std::exception_ptr error) {
  ask_for_all(kToAsk);
  const std::lock_guard lock(mutex_);
  if (broken_) return;
  // What the device has completed stays a result, although nobody has asked for it yet.
  compare_calls();
  check_operations();
  fail(std::move(error), /*tell=*/false);
  unheard_ = nullptr;  // who abandons knows why
}

// ---- the end

void NcclComm::move(State to) {
  using enum State;
  constexpr auto any_of = [](auto... states) { return (0u | ... | (1u << static_cast<unsigned>(states))); };
  [[maybe_unused]] constexpr std::array kNext = {
      any_of(starting, closing, failed),     // idle
      any_of(ready, idle, failed_starting),  // starting
      any_of(launching, closing, failed),    // ready
      any_of(ready, failed_launching),       // launching
      any_of(closed, failed),                // closing
      any_of(failed),                        // failed_starting
      any_of(failed),                        // failed_launching
      any_of(releasing),                     // failed
      any_of(releasing),                     // closed
      any_of(ended),                         // releasing
      any_of(),                              // ended
  };
  assert((kNext[static_cast<std::size_t>(state_.load())] & any_of(to)) != 0);
  state_ = to;
  changed_.notify_all();
}

void NcclComm::leave_nccl(State next) { move(is_over() ? State::failed : next); }

void NcclComm::fail(std::exception_ptr error, bool tell) {
  if (broken_) return;  // the first error is the cause; those that follow are consequences
  broken_ = error;
  if (!is_over()) {  // else it ends already
    move(state_ == State::starting    ? State::failed_starting
         : state_ == State::launching ? State::failed_launching
                                      : State::failed);
  }
  // First, because a thread that sees the error may end the process. The rank that raised has notified all others of a
  // block that ends, and this one revokes the group as its consequence. A mismatch is found by all.
  if (tell && !is_a<MismatchError>(error) && !is_a<StepError>(error)) {
    const std::string reason = text_of(error);
    signature_check_->abandon(error, reason);
    host_->abandon(error, reason);
  }
  // Of a rank that has gone the others learn as they close, and it is no error there.
  const bool is_heard = is_a<PeerLostError>(error);
  for (const auto& operation : pending_) {
    const bool had_returned = operation->launched && operation->launch.where == NcclLaunch::Where::in_stream;
    if (!is_heard && had_returned && !operation->ended) unheard_ = error;
    operation->finish(error);
  }
}

void NcclComm::release(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return state_ != State::failed_starting; });
  if (state_ == State::failed_launching) {
    // This interrupts the calls. The child may be aborted only when nobody is inside of NCCL with it.
    lock.unlock();
    member_.abort_parent();
    lock.lock();
    changed_.wait(lock, [this] { return state_ == State::failed; });
  }
  const bool aborts = state_ == State::failed;
  const std::list<std::shared_ptr<Operation>> ended = std::exchange(pending_, {});
  std::vector<std::shared_ptr<void>> for_graphs = std::exchange(for_graphs_, {});
  move(State::releasing);
  lock.unlock();
  aborts ? member_.abort() : member_.destroy();
  for (const auto& operation : ended) operation->launch.memory.clear();  // only now does the device use it no more
  for_graphs.clear();
  lock.lock();
  move(State::ended);
}

bool NcclComm::await_thread(State reached, const Deadline& deadline) {
  if (!watcher_.joinable()) return true;
  const bool in_time = await_until(deadline, [&] { return state_ >= reached; });
  if (!in_time) watcher_.detach();
  if (in_time && reached == State::ended) watcher_.join();
  return in_time;
}

void NcclComm::drop() {
  {
    const std::lock_guard lock(mutex_);
    fail(std::make_exception_ptr(NotInitializedError("the group was dropped")), /*tell=*/false);
  }
  if (await_thread(State::releasing, Deadline::after(kToNotice))) {
    await_thread(State::ended, Deadline::after(kPatience));
  }
}

void NcclComm::close(const Deadline& deadline) {
  bool whole = false;
  const auto all_have_ended = [&] {
    const std::lock_guard lock(mutex_);
    whole = !is_over();
    if (whole && !pending_.empty()) return false;
    if (whole && state_ != State::closing)
      move(State::closing);  // else another thread might launch what NCCL would wait for at its end
    return true;
  };
  await(all_have_ended, [&](Seconds) {
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", host_->name(), "' are pending"));
  });
  if (whole) {
    try {
      signature_check_->start({CollectiveType::barrier})->wait(deadline);  // peers may still need this rank
    } catch (const Error&) {
      abandon(std::current_exception());
    }
  }
  std::unique_lock lock(mutex_);
  if (state_ == State::closing) move(State::closed);
  const bool captured = looked_at_peers_.has_value();
  lock.unlock();
  const Deadline for_graphs = Deadline::after(kForGraphs);
  const bool stopped =
      await_thread(State::ended, captured && deadline.is_later_than(for_graphs) ? for_graphs : deadline);
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
  return unheard_;
}

bool NcclComm::device_has_ended() const { return state_ == State::ended && member_.has_ended(); }

void NcclComm::wait_for_device(const Deadline& deadline) const {
  {
    const std::lock_guard lock(mutex_);
    if (address_ == nullptr) return;  // no operation has started
  }
  await_until(deadline, [this] { return device_has_ended(); });
}

}  // namespace samestep
