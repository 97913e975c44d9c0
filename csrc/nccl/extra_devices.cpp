#include "nccl/extra_devices.h"

#include <utility>

#include "core/error.h"
#include "nccl/nccl_group.h"

namespace samestep {

namespace {

constexpr StreamHandle kLastDefaultStream = 2;  // 0, cudaStreamLegacy and cudaStreamPerThread

}  // namespace

ExtraDevices::ExtraDevices(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl,
                           const std::vector<int>& devices)
    : gpu_(std::move(gpu)), nccl_(std::move(nccl)) {
  for (const int device : devices) {
    // A stream belongs to the device that is current when it is made.
    const OnDevice on(*gpu_, device);
    members_.push_back({device, std::make_unique<GpuStream>(gpu_)});
  }
}

void ExtraDevices::init(NcclLibrary::Comm& first, int n_ranks, const nccl_abi::UniqueId& id, int rank) {
  if (members_.empty()) return nccl_->init(first, n_ranks, id, rank);
  const int n_here = 1 + static_cast<int>(members_.size());
  // Each of these calls waits for all members. One thread can start several only in a group.
  NcclGroup group(*nccl_);
  int number = rank * n_here;
  nccl_->init(first, n_ranks * n_here, id, number);
  for (Member& member : members_) {
    const OnDevice on(*gpu_, member.device);
    nccl_->init(member.comm, n_ranks * n_here, id, ++number);
  }
  group.end(first);
}

ExtraDevices::CommState ExtraDevices::state(NcclLibrary::Comm first) const {
  CommState worst{nccl_->state(first), first};
  for (const Member& member : members_) {
    const int state = nccl_->state(member.comm);
    const bool worse = worst.state == nccl_abi::kSuccess || worst.state == nccl_abi::kInProgress;
    if (worse && state != nccl_abi::kSuccess) worst = {state, member.comm};
  }
  return worst;
}

void ExtraDevices::make_stream_wait(GpuLibrary::Stream to) const {
  for (const Member& member : members_) {
    std::unique_ptr<GpuEvent> given;
    {
      const OnDevice on(*gpu_, member.device);
      given = std::make_unique<GpuEvent>(gpu_);
      // An event can be recorded only in a stream of its own device, but a stream of any device can wait for it.
      given->record(member.stream->get());
    }
    given->make_wait(to);
  }
}

std::vector<int> ExtraDevices::devices_of(StreamHandle stream, int first) const {
  std::vector<int> devices{first};
  if (stream > kLastDefaultStream) return devices;
  for (const Member& member : members_) devices.push_back(member.device);
  return devices;
}

void ExtraDevices::end_all(NcclLibrary::Comm first,
                           void (NcclLibrary::*end)(NcclLibrary::Comm) const noexcept) noexcept {
  const NcclLibrary& nccl = *nccl_;
  if (members_.empty()) {
    if (first != nullptr) (nccl.*end)(first);
    return;
  }
  // In a group, because each may wait for the others of this process; NCCL demands it for ncclCommFinalize, which is a
  // part of this.
  try {
    NcclGroup group(nccl);
    if (first != nullptr) (nccl.*end)(first);
    for (Member& member : members_) {
      if (member.comm != nullptr) (nccl.*end)(std::exchange(member.comm, nullptr));
    }
    group.end(nullptr);
  } catch (const Error&) {  // they have ended all the same
  }
}

}  // namespace samestep
