#include "nccl/nccl_channel.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/waiting.h"
#include "nccl/nccl_operation.h"

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kInterruptEvery{20};

struct Invitation {
  nccl_abi::UniqueId id;
  std::array<char, 384> failed{};  // why there is no id
};

}  // namespace

NcclChannel::NcclChannel(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> agreement)
    : options_(std::move(options)),
      host_(std::move(host)),
      agreement_(std::move(agreement)),
      further_(options_.gpu, options_.nccl, options_.further) {
  const OnDevice on(gpu(), options_.device);
  stream_ = std::make_unique<GpuStream>(options_.gpu);
}

std::shared_ptr<NcclChannel> NcclChannel::open(Options options, std::shared_ptr<Communicator> host,
                                               std::shared_ptr<Communicator> agreement, const Deadline& deadline) {
  std::shared_ptr<NcclChannel> channel(new NcclChannel(std::move(options), std::move(host), std::move(agreement)));
  try {
    channel->begin(deadline);
  } catch (...) {
    channel->fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  channel->watcher_ = std::thread([raw = channel.get()] { raw->watch(); });
  return channel;
}

void NcclChannel::begin(const Deadline& deadline) {
  const OnDevice on(gpu(), options_.device);
  for (int peer = 0; peer < host_->size(); ++peer) {
    if (peer != host_->rank()) alive_.push_back(agreement_->recv({&never_, 1, DType::uint8}, peer, 0));
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
  agreement_->broadcast(sent, 0, Shape::flat(sent.count))->wait(deadline);
  if (invitation.failed[0] != '\0') throw Error(str("NCCL does not start on rank 0: ", invitation.failed.data()));
  {
    std::unique_lock lock(mutex_);
    further_.init(comm_, host_->size(), invitation.id, host_->rank());
    settle(lock, "start NCCL", deadline);
  }
  agreement_->barrier()->wait(deadline);
}

void NcclChannel::settle(std::unique_lock<std::mutex>& lock, const std::string& act, const Deadline& deadline) {
  if (has_settled(act)) return;
  lock.unlock();  // others may look, give up or close meanwhile
  wait_hooks().aside([&] {
    Pause pause(/*oversubscribed=*/true);
    while (true) {
      const bool long_since = pause.step();
      if (long_since) wait_hooks().interrupt();
      const std::lock_guard look(mutex_);
      throw_if_broken();
      if (has_settled(act)) return;
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

bool NcclChannel::has_settled(const std::string& act) {
  const auto [state, comm] = further_.standing(comm_);
  if (state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) return state == nccl_abi::kSuccess;
  if (const std::exception_ptr lost = lost_peer()) std::rethrow_exception(lost);
  throw Error(str(act, " in group '", host_->name(), "': ", nccl().explain(state, comm)));
}

void NcclChannel::throw_if_broken() const {
  if (broken_) std::rethrow_exception(broken_);
  if (comm_ == nullptr) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

/// The right to launch, given in the order in which it was asked for.
class NcclChannel::Turn {
 public:
  Turn(NcclChannel& channel, std::unique_lock<std::mutex>& lock) : channel_(channel), lock_(lock) {
    channel_.turns_.push_back(this);
    if (channel_.turns_.front() == this) return;
    lock_.unlock();
    try {
      wait_hooks().aside([this] { wait(); });
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

  NcclChannel& channel_;
  std::unique_lock<std::mutex>& lock_;
};

std::shared_ptr<Work> NcclChannel::launch(NcclLaunch launch) {
  std::unique_lock lock(mutex_);
  const Turn turn(*this, lock);
  throw_if_broken();
  const OnDevice on(gpu(), options_.device);
  const Deadline deadline = Deadline::after(options_.timeout);
  auto end = std::make_unique<GpuEvent>(options_.gpu);
  order_after(options_.gpu, stream_->get(), launch.after);
  const auto operation = std::make_shared<Operation>(launch, sequence_++, deadline, std::move(end));
  under_way_.push_back(operation);  // its agreement is watched, and its memory kept, from here on
  changed_.notify_all();
  try {
    launch.calls(comm_, stream_->get());
    settle(lock, operation->what, deadline);
    for (const auto& calls : launch.then) {
      calls(comm_, stream_->get());
      settle(lock, operation->what, deadline);
    }
    operation->end->record(stream_->get());
  } catch (...) {  // other ranks may have begun it
    if (!lock.owns_lock()) lock.lock();
    fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  operation->launched = true;
  return work_on(operation);
}

void NcclChannel::fail(std::exception_ptr error, bool tell) {
  if (broken_) return;
  broken_ = error;
  changed_.notify_all();
  if (tell) {  // before anybody here knows, who may end the process
    const std::string reason = text_of(error);
    agreement_->abandon(error, reason);
    host_->abandon(error, reason);
  }
  // The watcher first tells of a difference, so that nobody who knows of it can begin anything elsewhere.
  if (!watcher_.joinable() || !is_mismatch(error) || !when_ranks_differ_) end_operations();
  if (!watcher_.joinable()) further_.abort(std::exchange(comm_, nullptr));
}

void NcclChannel::end_operations() {
  for (const auto& operation : under_way_) operation->finish(broken_);
}

void NcclChannel::when_ranks_differ(std::function<void(const std::exception_ptr&)> tell) {
  const std::lock_guard lock(mutex_);
  when_ranks_differ_ = std::move(tell);
}

void NcclChannel::abandon(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  fail(std::move(error), /*tell=*/false);
}

void NcclChannel::stop() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (!watcher_.joinable()) return;
  if (watcher_.get_id() == std::this_thread::get_id()) return watcher_.detach();  // the last owner was its callback
  watcher_.join();
}

void NcclChannel::close(const Deadline& deadline) {
  Pause pause(/*oversubscribed=*/true);
  bool whole = false;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      whole = !broken_ && comm_ != nullptr;
      if (!whole || (under_way_.empty() && turns_.empty())) break;
    }
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", host_->name(), "' are under way"));
    if (pause.step()) wait_hooks().interrupt();
  }
  if (whole) {
    try {
      agreement_->barrier()->wait(deadline);  // others may still need this rank's part
    } catch (const Error&) {
      abandon(std::current_exception());
    }
  }
  stop();
  const std::lock_guard lock(mutex_);
  for (const Communicator::WorkPtr& receive : alive_) agreement_->cancel(*receive);
  if (comm_ != nullptr && !broken_) further_.destroy(comm_);
  comm_ = nullptr;
}

NcclChannel::~NcclChannel() {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr && !broken_) {
      fail(std::make_exception_ptr(NotInitializedError("the group was dropped")), /*tell=*/false);
    }
  }
  stop();
}

}  // namespace samestep
