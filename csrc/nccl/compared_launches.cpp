#include "nccl/compared_launches.h"

#include <atomic>
#include <condition_variable>
#include <string>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/engine.h"
#include "exchange/waiting.h"

namespace samestep {

namespace {

constexpr std::chrono::milliseconds kLookEvery{1};

}  // namespace

/// Rung when there is something to launch. The thread that listens has it also when all else has gone.
class ComparedLaunches::Bell {
 public:
  void ring(bool ended = false) {
    const std::lock_guard lock(mutex_);
    rung_ = true;
    ended_ = ended_ || ended;
    changed_.notify_all();
  }
  /// False: never again.
  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return rung_ || ended_; });
    rung_ = false;
    return !ended_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false, ended_ = false;
};

class ComparedLaunches::ComparedWork final : public Work {
 public:
  ComparedWork(std::shared_ptr<ComparedLaunches> all, std::shared_ptr<NcclChannel> channel, NcclLaunch launch)
      : all_(std::move(all)),
        channel_(std::move(channel)),
        launch_(std::move(launch)),
        agreement_(launch_.agreement),
        what_(launch_.what) {}

  bool done() override {
    if (!begun_) all_->advance();
    return begun_ && (error_ != nullptr || inner_->done());
  }

  void wait(const Deadline& deadline) override {
    wait_for_begin(deadline);
    inner_->wait(deadline);
  }

  bool order_before(StreamHandle stream, const Deadline& deadline) override {
    wait_for_begin(deadline);
    return inner_->order_before(stream, deadline);
  }

  std::exception_ptr error() const override {
    if (!begun_) return nullptr;
    return error_ != nullptr ? error_ : inner_->error();
  }

  // ---- for ComparedLaunches, one thread at a time

  bool is_agreed_on() const { return agreement_ == nullptr || agreement_->done(); }

  void begin() {
    try {
      if (agreement_ != nullptr && agreement_->error()) std::rethrow_exception(agreement_->error());
      inner_ = channel_->launch(std::move(launch_));
    } catch (...) {
      error_ = std::current_exception();
    }
    begun_ = true;
  }

  void fail(const std::exception_ptr& error) {
    error_ = error;
    begun_ = true;
  }

 private:
  void wait_for_begin(const Deadline& deadline) {
    Pause pause(/*oversubscribed=*/true);
    for (all_->advance(); !begun_; all_->advance()) {
      if (!pause.step()) continue;
      wait_hooks().interrupt();
      Engine::progress_everywhere();
      if (!deadline.passed()) continue;
      if (!is_agreed_on()) agreement_->wait(deadline);  // which has passed: it says who is missing
      all_->advance();
      if (begun_) break;
      throw TimeoutError(str(what_, " has not begun after ", deadline.timeout().count(), " s"));
    }
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

  std::shared_ptr<ComparedLaunches> all_;
  std::shared_ptr<NcclChannel> channel_;
  NcclLaunch launch_;
  Communicator::WorkPtr agreement_;
  std::string what_;
  std::shared_ptr<Work> inner_;
  std::exception_ptr error_;
  std::atomic<bool> begun_ = false;
};

ComparedLaunches::ComparedLaunches(std::shared_ptr<NcclChannel> channel)
    : channel_(std::move(channel)), produced_(channel_->options().gpu), bell_(std::make_shared<Bell>()) {}

ComparedLaunches::~ComparedLaunches() {
  bell_->ring(/*ended=*/true);
  if (!launcher_.joinable()) return;
  if (launcher_.get_id() == std::this_thread::get_id()) {  // it was the last owner
    launcher_.detach();
  } else {
    launcher_.join();
  }
}

std::shared_ptr<ComparedLaunches> ComparedLaunches::make(std::shared_ptr<NcclChannel> channel) {
  const OnDevice on(channel->gpu(), channel->options().device);
  std::shared_ptr<ComparedLaunches> made(new ComparedLaunches(std::move(channel)));
  add_bystander(made);
  made->launcher_ = std::thread(&ComparedLaunches::launch_when_agreed, std::weak_ptr(made), made->bell_);
  return made;
}

void ComparedLaunches::launch_when_agreed(std::weak_ptr<ComparedLaunches> launches, std::shared_ptr<Bell> bell) {
  if (const auto all = launches.lock()) stay_on(all->channel_->gpu(), all->channel_->options().device);
  while (bell->wait()) {
    for (bool idle = false; !idle;) {
      std::this_thread::sleep_for(kLookEvery);  // whoever waits is sooner
      const std::shared_ptr<ComparedLaunches> all = launches.lock();
      try {
        idle = all == nullptr || all->idle();
      } catch (...) {  // of the transport
        all->abandon(std::current_exception());
        idle = true;
      }
    }
  }
}

std::shared_ptr<Work> ComparedLaunches::add(NcclLaunch launch, std::shared_ptr<NcclChannel> channel) {
  std::shared_ptr<ComparedWork> work;
  {
    const std::lock_guard lock(mutex_);
    const OnDevice on(channel->gpu(), channel->options().device);
    GpuLibrary::Stream produced = produced_.get();
    if (channel != channel_) {  // perhaps on another device
      auto stream = std::make_shared<GpuStream>(channel->options().gpu);
      produced = stream->get();
      launch.memory.push_back(std::move(stream));
    }
    order_after(channel->options().gpu, produced, launch.after);
    launch.after = {reinterpret_cast<StreamHandle>(produced)};
    work = std::make_shared<ComparedWork>(shared_from_this(), std::move(channel), std::move(launch));
    waiting_.push_back(work);
  }
  advance();
  bell_->ring();
  return work;
}

void ComparedLaunches::advance() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || launching_) return;
  while (!waiting_.empty() && waiting_.front()->is_agreed_on()) {
    const std::shared_ptr<ComparedWork> work = waiting_.front();
    launching_ = true;
    lock.unlock();  // a launch may be in progress for long
    work->begin();
    lock.lock();
    launching_ = false;
    if (!waiting_.empty() && waiting_.front() == work) waiting_.pop_front();
  }
}

void ComparedLaunches::abandon(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = launching_ ? 1 : 0; i < waiting_.size(); ++i) waiting_[i]->fail(error);
  waiting_.resize(launching_ && !waiting_.empty() ? 1 : 0);
}

bool ComparedLaunches::idle() {
  advance();
  const std::lock_guard lock(mutex_);
  return waiting_.empty();
}

}  // namespace samestep
