#include "nccl/nccl_member.h"

#include <utility>

#include "core/error.h"

namespace samestep {

NcclMember::NcclMember(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl, int device)
    : gpu_(std::move(gpu)),
      nccl_(std::move(nccl)),
      device_(device),
      stream_(std::make_unique<GpuStream>(gpu_, device)),
      events_(std::make_shared<EventPool>(gpu_, device)) {}

void NcclMember::init(int n_ranks, const nccl_abi::UniqueId& id, int rank) {
  const OnDevice on(*gpu_, device_);
  nccl_->init(parent_, n_ranks, id, rank);
}

void NcclMember::split(int rank) {
  const OnDevice on(*gpu_, device_);
  nccl_->split(parent_, rank, comm_);
}

NcclMember::CommState NcclMember::state() const {
  CommState found{nccl_abi::kSuccess, parent_};
  if (parent_ != nullptr) found.state = nccl_->state(parent_);
  if (found.state != nccl_abi::kSuccess) return found;
  // While the first was in progress NCCL might have been writing the address of the second.
  if (comm_ != nullptr) found = {nccl_->state(comm_), comm_};
  return found;
}

void NcclMember::abort() noexcept {
  abort_parent();
  end(comm_, &NcclLibrary::abort);
  try {
    std::shared_ptr<GpuEvent> last = events_->take();
    last->record(stream());
    end_ = std::move(last);
  } catch (const Error&) {  // the device is lost
  }
}

bool NcclMember::has_ended() const {
  try {
    return end_ != nullptr && end_->is_complete();
  } catch (const Error&) {  // the device is lost
    return false;
  }
}

void NcclMember::destroy() noexcept {
  if (state().state != nccl_abi::kSuccess) return abort();
  end(comm_, &NcclLibrary::destroy);
  end(parent_, &NcclLibrary::destroy);
}

void NcclMember::end(NcclLibrary::Comm& comm,
                     void (NcclLibrary::*how)(NcclLibrary::Comm) const noexcept) const noexcept {
  if (comm == nullptr) return;
  try {
    const OnDevice on(*gpu_, device_);
    ((*nccl_).*how)(std::exchange(comm, nullptr));
  } catch (const Error&) {  // the device is lost
  }
}

}  // namespace samestep
