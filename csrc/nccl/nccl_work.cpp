#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "engine/progress_engine.h"
#include "nccl/nccl_operation.h"
#include "waiting/backoff.h"

namespace samestep {

class NcclComm::NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclComm> channel, std::shared_ptr<Operation> operation)
      : channel_(std::move(channel)), operation_(std::move(operation)) {}

  bool done() override {
    if (operation_->ended) return true;
    const std::unique_lock lock(channel_->mutex_, std::try_to_lock);
    if (!lock) return false;  // others look; the caller may hold the GIL, which they may need
    try {
      // Its error is left to the watching thread, which draws the consequences for the group.
      channel_->check_operation(*operation_, Clock::now());
    } catch (const Error&) {  // of the runtime: the device is lost
      channel_->fail(std::current_exception(), /*tell=*/true);
    }
    return operation_->ended;
  }

  void wait(const Deadline& deadline) override {
    Backoff pause(/*oversubscribed=*/true);
    bool warned = false;
    while (!done()) {
      // About every millisecond: signals, and progress for peers that wait for this rank in other groups.
      if (!pause.step()) continue;
      wait_hooks().interrupt();
      ProgressEngine::progress_everywhere();
      if (!warned && pause.waited().count() > wait_hooks().warn_after_s) {
        warned = true;
        wait_hooks().warn(operation_->what + " is still waited for");
      }
      if (deadline.passed() && !done()) throw_late(deadline);
    }
    if (operation_->error) std::rethrow_exception(operation_->error);
  }

  bool make_stream_wait(StreamHandle stream, const Deadline&) override {
    if (operation_->ended && operation_->error) std::rethrow_exception(operation_->error);
    // A wait for what is no part of the capture would end it. The graph is launched after the host's wait.
    if (channel_->gpu().is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream))) return false;
    // The handle of a default stream stands for one stream on each device. All of them wait.
    for (const int device : channel_->extra_.devices_of(stream, channel_->options_.device)) {
      const OnDevice on(channel_->gpu(), device);
      operation_->end->make_wait(reinterpret_cast<GpuLibrary::Stream>(stream));
    }
    return true;
  }

  std::exception_ptr error() const override { return operation_->ended ? operation_->error : nullptr; }

 private:
  [[noreturn]] void throw_late(const Deadline& deadline) const {
    std::string missing;
    if (operation_->signature_check != nullptr && !operation_->signature_check->done()) {
      try {
        operation_->signature_check->wait(deadline);  // which has passed: it says who is missing
      } catch (const TimeoutError& error) {
        missing = str(": ", error.what());
      }
    }
    // The wait is over, not the operation: it keeps the group's own deadline.
    std::rethrow_exception(channel_->timeout_error(*operation_, deadline, missing));
  }

  std::shared_ptr<NcclComm> channel_;
  std::shared_ptr<Operation> operation_;
};

std::shared_ptr<Work> NcclComm::work_on(std::shared_ptr<Operation> operation) {
  return std::make_shared<NcclWork>(shared_from_this(), std::move(operation));
}

}  // namespace samestep
