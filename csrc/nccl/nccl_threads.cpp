#include <algorithm>
#include <iterator>
#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "nccl/nccl_comm.h"
#include "process/wait_hooks.h"
#include "waiting/await.h"
#include "waiting/backoff.h"

// How operations begin, and the watching thread.

namespace samestep {
namespace {

constexpr std::size_t kMostConnected = 4096;  // bounds the set when lengths change on every call
constexpr std::chrono::milliseconds kLookEvery{2};
constexpr int kLooksBeforeSleep = 100;      // of the watching thread: to wake it costs an operation some microseconds
constexpr Seconds kLookAtPeersAfter{0.05};  // an operation that takes longer may wait for one that has gone
// For the host to learn which rank has gone, when NCCL only knows that one has; and for the device to finish an
// operation that the ranks which have gone may have finished.
constexpr Seconds kGrace{1.0};
constexpr Seconds kForComparison{5.0};  // and for ranks that are being compared to find out that they differ

}  // namespace

void NcclComm::start_nccl(const NcclAddress::Until& until) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_broken();
    move(State::starting);
  }
  std::exception_ptr error;
  try {
    const OnDevice on(gpu(), options_.device);
    const nccl_abi::UniqueId address = address_->wait(until, [this] {
      const std::lock_guard look(mutex_);
      throw_if_broken();
    });
    member_.init(host_->size(), address, host_->rank());
    wait_until_ready("start NCCL", until);
    member_.split(host_->rank());
    wait_until_ready("start NCCL", until);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  leave_nccl(error ? State::idle : State::ready);
  if (error) std::rethrow_exception(error);
}

void NcclComm::wait_until_ready(const std::string& act, const NcclAddress::Until& until) {
  Backoff pause(/*oversubscribed=*/true);
  while (true) {
    const bool long_since = pause.step();
    if (long_since) wait_hooks().interrupt();
    const Deadline deadline = until();  // without the mutex, which it may take
    // For one look at a time: between looks other threads may end this communicator.
    const std::lock_guard look(mutex_);
    throw_if_broken();
    const auto [state, comm] = member_.state();
    if (state == nccl_abi::kSuccess) return;
    if (state != nccl_abi::kInProgress) {
      // NCCL reports only that something has failed. What the host knows names the rank or the mismatch.
      if (const std::exception_ptr cause = host_cause()) std::rethrow_exception(cause);
      throw Error(str(act, " in group '", host_->name(), "': ", nccl().explain(state, comm)));
    }
    if (!long_since) continue;
    if (const std::exception_ptr left = lost()) std::rethrow_exception(left);
    if (deadline.passed()) {
      throw TimeoutError(
          str(act, " in group '", host_->name(), "': NCCL did not finish within ", deadline.timeout().count(),
              " s on this rank or a peer. Between hosts SAMESTEP_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, "
              "names the network interface that leads to the others; NCCL_DEBUG=INFO shows which one NCCL "
              "uses. All ranks must call the operations of all groups on a device in one order"));
    }
  }
}

void NcclComm::watch_from_now(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  throw_if_broken();
  operation->sequence = sequence_++;
  operation->logged = log_.add(operation->launch.compared, operation->is_captured(), operation->sequence);
  if (operation->is_captured()) {
    if (!looked_at_peers_) looked_at_peers_.emplace();
    const std::vector<std::shared_ptr<void>>& memory = operation->launch.memory;
    for_graphs_.insert(for_graphs_.end(), memory.begin(), memory.end());
  }
  while (!pending_.empty() && pending_.front()->ended) pending_.pop_front();
  pending_.push_back(operation);
  changed_.notify_all();  // the thread may sleep
  // Whoever waits for this on the host should not have to wait for the watching threads.
  if (operation->launch.where != NcclLaunch::Where::own_stream) return;
  if (const std::exception_ptr error = compare_calls()) fail(error);
}

bool NcclComm::waits_for_nobody(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  return state_ >= State::ready && (host_->size() == 1 || connected_.contains(operation.launch.calls.connections));
}

void NcclComm::begin(const std::shared_ptr<Operation>& operation) {
  std::exception_ptr error;
  try {
    // Which operations alone do, in their turns.
    if (state_ == State::idle)
      start_nccl([&] {
        const std::lock_guard lock(mutex_);
        return operation->deadline;
      });
    {
      const std::lock_guard lock(mutex_);
      throw_if_broken();
      move(State::launching);
    }
    make_calls(*operation);
  } catch (...) {
    error = std::current_exception();
  }
  end_launch(*operation, error);
}

void NcclComm::end_launch(Operation& operation, std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  const bool of_calls = state_ == State::launching || state_ == State::failed_launching;
  if (of_calls) leave_nccl(State::ready);
  if (error == nullptr) {
    if (connected_.size() >= kMostConnected) connected_.clear();
    connected_.insert(operation.launch.calls.connections);
    operation.launched = true;
  } else if (!broken_) {  // other ranks may have started it
    if (const std::exception_ptr cause = of_calls ? await_host_cause(lock) : host_cause()) error = cause;
    fail(error);
  }
  operation.launch.calls.enqueue = nullptr;
}

void NcclComm::make_calls(Operation& operation) {
  const OnDevice on(gpu(), options_.device);
  const bool in_own = operation.launch.where == NcclLaunch::Where::own_stream;
  const GpuLibrary::Stream stream =
      in_own ? member_.stream() : reinterpret_cast<GpuLibrary::Stream>(operation.launch.after.front());
  for (const std::shared_ptr<GpuEvent>& produced : operation.after) produced->make_wait(stream);
  operation.after.clear();  // the events can be used again
  operation.turn = ++turns_;
  operation.launch.calls.enqueue(member_.comm(), stream);
  if (operation.is_captured()) return;  // its event would be part of the graph, and nobody may ask about it
  operation.end = member_.events().take();
  operation.end->record(stream);
}

// A mismatch first: a rank that has raised because of it may have left already.
std::exception_ptr NcclComm::host_cause() {
  const std::exception_ptr differs = compare_calls();
  return differs ? differs : lost();
}

std::exception_ptr NcclComm::await_host_cause(std::unique_lock<std::mutex>& lock) {
  const Deadline grace = Deadline::after(kGrace), comparison = Deadline::after(kForComparison);
  std::exception_ptr cause = host_cause();
  while (!cause && !broken_ && !(log_.is_idle() ? grace : comparison).passed()) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    lock.lock();
    cause = host_cause();
  }
  return cause;
}

std::exception_ptr NcclComm::compare_calls() {
  if (broken_) return nullptr;
  try {
    log_.progress();
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr NcclComm::timeout_error(const Operation& operation, const Deadline& deadline) {
  const std::string text = str(operation.launch.describe(), " (device operation ", operation.sequence, " of group '",
                               host_->name(), "') has not ended after ", deadline.timeout().count(), " s: ");
  if (log_.agrees(operation.logged)) {
    return std::make_exception_ptr(TimeoutError(
        text + (operation.launched ? "all ranks have started it, but the device has not finished it"
                                   : "all ranks have called it, but NCCL has not connected them for it, or for an "
                                     "earlier operation on this device; all ranks must call the operations of all "
                                     "groups on a device in one order")));
  }
  const std::string late = log_.late_ranks(deadline.timeout());
  return std::make_exception_ptr(
      TimeoutError(str(text, "not all ranks have reached it", late.empty() ? "" : ": ", late)));
}

std::exception_ptr NcclComm::check_operation(Operation& operation, Clock::time_point now) {
  if (operation.ended) return operation.error;
  // Both: an operation has not succeeded before it is known that all ranks have called the same one.
  const bool agreed = log_.agrees(operation.logged);
  if (agreed && operation.completed) {
    if (const int state = member_.state().state; state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) {
      operation.finish(nullptr);
    }
    return nullptr;
  }
  if (operation.deadline.passed()) return timeout_error(operation, operation.deadline);
  if (now - operation.started < kLookAtPeersAfter) return nullptr;
  const std::exception_ptr left = lost();
  if (!left || !agreed || !operation.launched) return left;
  // All ranks have called it. A rank that has left may have its result, and this device may soon have its own.
  if (operation.peer_lost_at == Clock::time_point{}) operation.peer_lost_at = now;
  return now - operation.peer_lost_at < kGrace ? nullptr : left;
}

std::exception_ptr NcclComm::ask_device(Operation& operation, Seconds patience) {
  if (!operation.launched || operation.completed) return nullptr;
  std::unique_lock alone(asking_, std::defer_lock);
  await_until(Deadline::after(patience), [&] { return alone.try_lock(); });
  try {
    // A captured one runs whenever its graph does.
    if (operation.is_captured() || (alone && operation.end->is_complete())) operation.completed = true;
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

void NcclComm::check_all(std::unique_lock<std::mutex>& lock) {
  // While NCCL starts, the thread that starts it polls. Polling reads variables of NCCL; under the mutex no other
  // thread ends the communicator meanwhile.
  const auto [state, comm] =
      state_ >= State::ready ? member_.state() : NcclMember::CommState{nccl_abi::kSuccess, nullptr};
  if (state != nccl_abi::kSuccess && state != nccl_abi::kInProgress) {
    const std::string text = str("NCCL in group '", host_->name(), "': ", nccl().explain(state, comm));
    const std::exception_ptr cause = await_host_cause(lock);
    if (broken_) return;
    return fail(cause ? cause : std::make_exception_ptr(Error(text)));
  }
  if (const std::exception_ptr error = compare_calls()) return fail(error);
  if (const std::exception_ptr error = check_operations()) return fail(error);
  // Nobody sees the operations of graphs run, so a rank that has gone counts although nothing is pending.
  const Clock::time_point now = Clock::now();
  const bool pending = std::ranges::any_of(pending_, [](const auto& operation) { return !operation->ended; });
  if (pending || !looked_at_peers_ || state_ == State::closing || now - *looked_at_peers_ <= kLookAtPeersAfter) return;
  looked_at_peers_ = now;
  if (const std::exception_ptr left = lost()) fail(left);
}

std::exception_ptr NcclComm::check_operations() {
  for (const auto& operation : pending_) {
    if (const std::exception_ptr error = check_operation(*operation, Clock::now())) return error;
  }
  return nullptr;
}

std::exception_ptr NcclComm::ask_for_all(Seconds patience) {
  std::vector<std::shared_ptr<Operation>> outstanding;  // dropped without the mutex: that may free device memory
  std::unique_lock lock(mutex_);
  std::ranges::copy_if(pending_, std::back_inserter(outstanding),
                       [](const auto& operation) { return operation->launched && !operation->completed; });
  lock.unlock();
  std::exception_ptr lost;
  const auto has_completed = [&](const auto& operation) {
    if (!lost) lost = ask_device(*operation, patience);
    return operation->completed.load();
  };
  // Each question delays the threads that enqueue. A stream completes operations in their order, so few find the last.
  for (auto first = outstanding.begin(); first != outstanding.end();) {
    const auto end = std::adjacent_find(first, outstanding.end(),
                                        [](const auto& one, const auto& next) { return !next->follows(*one); });
    const auto behind = end == outstanding.end() ? end : std::next(end);
    const auto completed = std::partition_point(first, behind, has_completed);
    std::for_each(first, completed, [](const auto& operation) { operation->completed = true; });
    if (completed != behind) break;
    first = behind;
  }
  return lost;
}

void NcclComm::poll() {
  const std::exception_ptr lost = ask_for_all();
  std::unique_lock lock(mutex_);
  if (broken_) return;
  if (lost) return fail(lost);
  try {
    check_all(lock);
  } catch (const Error&) {
    fail(std::current_exception());
  }
  if (broken_) return;
  // pairs with Operation::finish: the error is visible
  pending_.remove_if([](const auto& operation) { return operation->ended.load(); });
}

void NcclComm::watch() {
  int idle_looks = kLooksBeforeSleep;
  std::unique_lock lock(mutex_);
  while (!is_over()) {
    // Sleeps where nothing has been outstanding for a while, so that idle groups cost nothing.
    idle_looks = pending_.empty() && !looked_at_peers_ ? idle_looks + 1 : 0;
    if (idle_looks > kLooksBeforeSleep) {
      changed_.wait(lock, [this] { return is_over() || !pending_.empty(); });
      idle_looks = 0;
      continue;
    }
    lock.unlock();
    poll();
    if (const std::shared_ptr<ProgressSource> beside = options_.beside.lock()) beside->advance();
    std::this_thread::sleep_for(kLookEvery);
    lock.lock();
  }
  release(lock);
}

}  // namespace samestep
