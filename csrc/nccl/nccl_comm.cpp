#include "nccl/nccl_comm.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "nccl/nccl_operation.h"
#include "waiting/backoff.h"

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kInterruptEvery{20};

// Rank 0 sends one in any case. Without the text the others would wait for an id until their deadline.
struct Invitation {
  nccl_abi::UniqueId id;
  std::array<char, 384> failed{};  // why there is no id; empty if there is one
};

}  // namespace

NcclComm::NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check)
    : options_(std::move(options)),
      host_(std::move(host)),
      signature_check_(std::move(signature_check)),
      extra_(options_.gpu, options_.nccl, options_.extra) {
  const OnDevice on(gpu(), options_.device);
  stream_ = std::make_unique<GpuStream>(options_.gpu);
}

std::shared_ptr<NcclComm> NcclComm::open(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check, const Deadline& deadline) {
  std::shared_ptr<NcclComm> channel(new NcclComm(std::move(options), std::move(host), std::move(signature_check)));
  try {
    channel->begin(deadline);
  } catch (...) {
    // Other ranks may have succeeded, or wait in NCCL for this one.
    channel->fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  channel->watcher_ = std::thread([raw = channel.get()] { raw->watch(); });
  return channel;
}

void NcclComm::begin(const Deadline& deadline) {
  const OnDevice on(gpu(), options_.device);
  // Nothing is ever sent to these receives. The host group fails them when a peer is lost, which NCCL may never notice.
  for (int peer = 0; peer < host_->size(); ++peer) {
    if (peer != host_->rank())
      liveness_receives_.push_back(signature_check_->recv({&unused_byte_, 1, DType::uint8}, peer, 0));
  }
  Invitation invitation;
  if (host_->rank() == 0) {
    try {
      invitation.id = nccl().unique_id();
    } catch (const Error& error) {
      std::strncpy(invitation.failed.data(), error.what(), invitation.failed.size() - 1);
    }
  }
  const Buffer sent{&invitation, sizeof invitation, DType::uint8};
  signature_check_->start({.type = CollectiveType::bcast, .out = sent, .root = 0, .shape = Shape::flat(sent.count)})
      ->wait(deadline);
  if (invitation.failed[0] != '\0') throw Error(str("NCCL does not start on rank 0: ", invitation.failed.data()));
  {
    std::unique_lock lock(mutex_);
    extra_.init(comm_, host_->size(), invitation.id, host_->rank());
    wait_until_ready(lock, "start NCCL", deadline);
  }
  // NCCL may have failed on some ranks only. Those have abandoned the group, so this fails on all of them.
  signature_check_->start({CollectiveType::barrier})->wait(deadline);
}

void NcclComm::wait_until_ready(std::unique_lock<std::mutex>& lock, const std::string& act, const Deadline& deadline) {
  if (is_ready(act)) return;
  lock.unlock();  // other threads may poll, abandon or close meanwhile
  wait_hooks().run_without_gil([&] {
    Backoff pause(/*oversubscribed=*/true);
    while (true) {
      const bool long_since = pause.step();
      if (long_since) wait_hooks().interrupt();
      // For one look at a time: between looks other threads may end this communicator.
      const std::lock_guard look(mutex_);
      throw_if_broken();
      if (is_ready(act)) return;
      if (!long_since) continue;
      if (const std::exception_ptr lost = lost_peer()) std::rethrow_exception(lost);
      if (deadline.passed()) {
        throw TimeoutError(str(act, " in group '", host_->name(), "': NCCL has not come to an end after ",
                               deadline.timeout().count(), " s, on this or another rank"));
      }
    }
  });
  lock.lock();
  throw_if_broken();
}

bool NcclComm::is_ready(const std::string& act) {
  const auto [state, comm] = extra_.state(comm_);
  if (state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) return state == nccl_abi::kSuccess;
  // NCCL reports that something has failed. What the host knows names the rank or the mismatch.
  if (const std::exception_ptr cause = host_cause()) std::rethrow_exception(cause);
  throw Error(str(act, " in group '", host_->name(), "': ", nccl().explain(state, comm)));
}

void NcclComm::throw_if_broken() const {
  if (broken_) std::rethrow_exception(broken_);
  if (comm_ == nullptr) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

/// The right to launch, granted in the order of the calls.
class NcclComm::Turn {
 public:
  Turn(NcclComm& channel, std::unique_lock<std::mutex>& lock) : channel_(channel), lock_(lock) {
    channel_.turns_.push_back(this);
    // The usual case: no other thread launches, and the mutex stays locked.
    if (channel_.turns_.front() == this) return;
    lock_.unlock();
    try {
      wait_hooks().run_without_gil([this] { wait(); });
    } catch (...) {
      lock_.lock();
      end();
      throw;
    }
    lock_.lock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (!lock_.owns_lock()) lock_.lock();
    end();
  }

 private:
  void wait() {
    std::unique_lock alone(channel_.mutex_);
    while (channel_.turns_.front() != this) {
      // A bounded sleep, because a signal does not end it.
      channel_.changed_.wait_for(alone, kInterruptEvery);
      alone.unlock();
      wait_hooks().interrupt();
      alone.lock();
    }
  }
  void end() {
    std::erase(channel_.turns_, this);
    channel_.changed_.notify_all();
  }

  NcclComm& channel_;
  std::unique_lock<std::mutex>& lock_;
};

std::shared_ptr<Work> NcclComm::launch(NcclLaunch launch) {
  std::unique_lock lock(mutex_);
  const Turn turn(*this, lock);
  throw_if_broken();
  const OnDevice on(gpu(), options_.device);
  // Of the group, because the caller may never wait for this operation on the host.
  const Deadline deadline = Deadline::after(options_.timeout);
  const auto operation =
      std::make_shared<Operation>(launch, sequence_++, deadline, std::make_unique<GpuEvent>(options_.gpu));
  pending_.push_back(operation);  // from here on its signature check is watched and its memory kept
  launching_ = true;
  changed_.notify_all();
  // The watching thread does not abort it while `launching_` is set, unless a call blocks for longer than it waits.
  const NcclLibrary::Comm comm = comm_;
  try {
    lock.unlock();  // each of these calls blocks while its stream is full, and the watching thread has to see deadlines
    order_after(options_.gpu, stream_->get(), launch.after);
    launch.calls(comm, stream_->get());
    lock.lock();
    wait_until_ready(lock, operation->what, deadline);
    lock.unlock();
    if (launch.once_enqueued) launch.once_enqueued(stream_->get());
    operation->end->record(stream_->get());
    lock.lock();
    throw_if_broken();
  } catch (...) {  // other ranks may have started it
    if (!lock.owns_lock()) lock.lock();
    launching_ = false;
    fail(std::current_exception(), /*tell=*/!is_mismatch(std::current_exception()));
    changed_.notify_all();
    std::rethrow_exception(broken_);  // what ended it first
  }
  launching_ = false;
  operation->launched = true;
  return work_on(operation);
}

void NcclComm::fail(std::exception_ptr error, bool tell) {
  // The first error is the cause; those that follow are consequences.
  if (broken_) return;
  broken_ = error;
  changed_.notify_all();
  if (tell) {  // first, because a thread that sees the error may end the process
    const std::string reason = text_of(error);
    signature_check_->abandon(error, reason);
    host_->abandon(error, reason);
  }
  // On a mismatch the watching thread first ends the other communicators, so that no caller can start anything there.
  if (!watcher_.joinable() || !is_mismatch(error) || !on_mismatch_) end_operations();
  // Only `begin` fails without a watching thread. Later that thread aborts, without the mutex, because an abort may
  // block.
  if (!watcher_.joinable()) extra_.abort(std::exchange(comm_, nullptr));
}

void NcclComm::end_operations() {
  for (const auto& operation : pending_) operation->finish(broken_);
}

void NcclComm::set_on_mismatch(std::function<void(const std::exception_ptr&)> tell) {
  const std::lock_guard lock(mutex_);
  on_mismatch_ = std::move(tell);
}

void NcclComm::abandon(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  fail(std::move(error), /*tell=*/false);
}

void NcclComm::stop() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (!watcher_.joinable()) return;
  if (watcher_.get_id() == std::this_thread::get_id())
    return watcher_.detach();  // its own callback dropped the last pointer
  watcher_.join();
}

void NcclComm::close(const Deadline& deadline) {
  Backoff pause(/*oversubscribed=*/true);
  bool whole = false;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      whole = !broken_ && comm_ != nullptr;
      // The watching thread empties the list. If the group is broken, there is nothing to wait for.
      if (!whole || (pending_.empty() && turns_.empty())) break;
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
  stop();
  const std::lock_guard lock(mutex_);
  for (const Communicator::WorkPtr& receive : liveness_receives_) receive->cancel();
  // Only now, without the watching thread, can nobody else be inside of NCCL with this communicator.
  if (comm_ != nullptr && !broken_) extra_.destroy(comm_);
  comm_ = nullptr;
}

NcclComm::~NcclComm() {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr && !broken_) {
      // Dropped without `close`, which waits for outstanding operations: they are aborted.
      fail(std::make_exception_ptr(NotInitializedError("the group was dropped")), /*tell=*/false);
    }
  }
  stop();
}

}  // namespace samestep
