#include "nccl/nccl_comm.h"

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "nccl/nccl_operation.h"

namespace samestep {
namespace {

std::vector<int> devices_of(const NcclComm::Options& options) {
  std::vector<int> devices{options.device};
  devices.insert(devices.end(), options.extra.begin(), options.extra.end());
  return devices;
}

}  // namespace

NcclComm::NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check)
    : options_(std::move(options)),
      host_(std::move(host)),
      signature_check_(std::move(signature_check)),
      members_(std::make_shared<NcclMembers>(options_.gpu, options_.nccl, devices_of(options_))) {}

std::shared_ptr<NcclComm> NcclComm::make(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check) {
  return std::shared_ptr<NcclComm>(new NcclComm(std::move(options), std::move(host), std::move(signature_check)));
}

std::shared_ptr<NcclComm> NcclComm::open(Options options, std::shared_ptr<Communicator> host,
                                         std::shared_ptr<Communicator> signature_check, const Deadline& deadline) {
  std::shared_ptr<NcclComm> made = make(std::move(options), std::move(host), std::move(signature_check));
  try {
    made->prepare();
    wait_hooks().run_without_gil([&] { made->start_nccl(deadline); });
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
  if (broken_) std::rethrow_exception(broken_);
  if (ending_) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

std::shared_ptr<Work> NcclComm::launch(NcclLaunch launch) {
  const std::vector<std::vector<StreamHandle>> after = std::move(launch.after);
  // The deadline is the group's, because the caller may never wait for this operation on the host.
  const auto operation = std::make_shared<Operation>(std::move(launch), Deadline::after(options_.timeout));
  watch_from_now(operation);
  wait_hooks().run_without_gil([&] {
    try {
      for (std::size_t i = 0; i < after.size(); ++i) {  // as the streams are now, whenever NCCL is called
        const NcclMembers::Member& member = members_->all()[i];
        const OnDevice on(gpu(), member.device);
        operation->after.push_back(member.events->record(after[i]));
      }
    } catch (const Error&) {
      const std::lock_guard lock(mutex_);
      fail(std::current_exception(), /*tell=*/true);
    }
    if (enroll(operation)) enqueue(*operation);
  });
  // Also if it has failed already: `wait` throws its error, and the work keeps the arrays that NCCL may be using.
  return work_on(operation);
}

void NcclComm::set_on_mismatch(std::function<void(const std::exception_ptr&)> tell) {
  const std::lock_guard lock(mutex_);
  on_mismatch_ = std::move(tell);
}

void NcclComm::abandon(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  fail(std::move(error), /*tell=*/false);
}

}  // namespace samestep
