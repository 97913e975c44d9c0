#include "core/error.h"
#include "core/format.h"
#include "nccl/nccl_comm.h"
#include "waiting/await.h"

namespace samestep {

class NcclComm::NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclComm> channel, std::shared_ptr<Operation> operation)
      : channel_(std::move(channel)), operation_(std::move(operation)) {}

  bool done() override {
    if (operation_->ended) return true;
    channel_->owner_.require(channel_->host_->rank(), channel_->host_->name());
    std::exception_ptr error = channel_->ask_device(*operation_);
    const std::unique_lock lock(channel_->mutex_, std::try_to_lock);
    if (!lock) return operation_->ended;  // others look; the caller may hold the GIL, which they may need
    if (!error) error = channel_->compare_calls();
    if (error) channel_->fail(error);
    channel_->check_operation(*operation_, Clock::now());
    return operation_->ended;
  }

  void wait(const Deadline& deadline) override {
    wait_until(deadline, [this] { return done(); });
    throw_if_failed();
  }

  /// Waits on the host until NCCL has the operation: only then is there an end to wait for.
  bool make_stream_wait(StreamHandle stream, const Deadline& deadline) override {
    wait_for_launch(deadline);
    const int device = channel_->options_.device;
    const bool captures = channel_->gpu().is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream), device);
    if (operation_->is_captured()) {
      // What follows in its own stream, or after the capture, needs no wait. Another stream of the capture does.
      auto* const own = reinterpret_cast<GpuLibrary::Stream>(operation_->launch.after.front());
      auto* const later = reinterpret_cast<GpuLibrary::Stream>(stream);
      if (captures && later != own && channel_->gpu().is_capturing(own, device)) {
        const std::shared_ptr<GpuEvent> so_far = channel_->member_.events().take();
        so_far->record(own);
        so_far->make_wait(later);
      }
      return true;
    }
    // A wait for what is no part of the capture would end it. The graph is launched after the host's wait.
    if (captures) return false;
    operation_->end->make_wait(reinterpret_cast<GpuLibrary::Stream>(stream));
    return true;
  }

  /// Waits on the host until NCCL has the operation. Throws its error, if it has failed.
  void wait_for_launch(const Deadline& deadline) {
    wait_until(deadline, [this] { return operation_->launched || done(); });
    throw_if_failed();
  }

  bool is_captured() const { return operation_->is_captured(); }
  bool asks_device() const override { return true; }
  /// That all ranks have captured an operation does not end it: other streams of the capture have to wait for it.
  bool has_ended() const override { return operation_->ended && !operation_->is_captured(); }
  bool device_has_ended() const override { return channel_->device_has_ended(); }
  std::exception_ptr error() const override { return operation_->ended ? operation_->error : nullptr; }

 private:
  void throw_if_failed() {
    if (!operation_->ended || !operation_->error) return;
    const std::lock_guard lock(channel_->mutex_);
    channel_->unheard_ = nullptr;
    std::rethrow_exception(operation_->error);
  }

  template <class Ready>
  void wait_until(const Deadline& deadline, Ready ready) {
    bool is_first = true, warned = false;
    await(ready, [&](Seconds waited) {
      if (std::exchange(is_first, false)) postpone(deadline);
      if (!warned && waited.count() > wait_hooks().warn_after_s) {
        warned = true;
        wait_hooks().warn(operation_->launch.describe() + " is still waited for");
      }
      if (deadline.passed() && !ready()) throw_late(deadline);
    });
  }

  /// The operation fails at the group's deadline, unless somebody waits for longer.
  void postpone(const Deadline& deadline) const {
    const std::lock_guard lock(channel_->mutex_);
    if (deadline.is_later_than(operation_->deadline)) operation_->deadline = deadline;
  }

  [[noreturn]] void throw_late(const Deadline& deadline) const {
    // The wait is over, not the operation: it keeps the group's own deadline.
    const std::lock_guard lock(channel_->mutex_);
    std::rethrow_exception(channel_->timeout_error(*operation_, deadline));
  }

  std::shared_ptr<NcclComm> channel_;
  std::shared_ptr<Operation> operation_;
};

std::shared_ptr<Work> NcclComm::launch(NcclLaunch launch) {
  // Also if it has failed already: `wait` throws its error, and the work keeps the arrays that NCCL may be using.
  const auto work = work_on(enqueue(std::move(launch)));
  // The capture may end as soon as this returns, and what NCCL gets later is no part of the graph.
  if (work->is_captured()) work->wait_for_launch(Deadline::after(options_.timeout));
  return work;
}

std::shared_ptr<Work> NcclComm::run(NcclLaunch launch) {
  std::shared_ptr<Operation> operation = enqueue(std::move(launch));
  return operation->launched ? nullptr : work_on(std::move(operation));
}

std::shared_ptr<NcclComm::NcclWork> NcclComm::work_on(std::shared_ptr<Operation> operation) {
  return std::make_shared<NcclWork>(user_.lock(), std::move(operation));
}

}  // namespace samestep
