#include "nccl/nccl_members.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "nccl/nccl_group.h"

namespace samestep {

namespace {

constexpr StreamHandle kLastDefaultStream = 2;  // 0, cudaStreamLegacy and cudaStreamPerThread

}  // namespace

NcclMembers::NcclMembers(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl,
                         const std::vector<int>& devices)
    : gpu_(std::move(gpu)), nccl_(std::move(nccl)) {
  for (const int device : devices) {
    members_.push_back({device, std::make_unique<GpuStream>(gpu_, device), std::make_shared<EventPool>(gpu_)});
  }
}

void NcclMembers::init(int n_ranks, const nccl_abi::UniqueId& id, int rank) {
  const int n_here = static_cast<int>(members_.size());
  NcclGroup group(*nccl_);
  // Each of these calls waits for all members. One thread can start several only in a group.
  int number = rank * n_here;
  for (Member& member : members_) {
    const OnDevice on(*gpu_, member.device);
    nccl_->init(member.parent, n_ranks * n_here, id, number++);
  }
  group.end(nullptr);
}

void NcclMembers::split(int rank) {
  if (!nccl_->can_split()) {
    for (Member& member : members_) member.comm = std::exchange(member.parent, nullptr);
    return;
  }
  const int n_here = static_cast<int>(members_.size());
  NcclGroup group(*nccl_);
  for (Member& member : members_) {
    const OnDevice on(*gpu_, member.device);
    nccl_->split(member.parent, rank * n_here + static_cast<int>(&member - members_.data()), member.comm);
  }
  group.end(nullptr);
}

NcclMembers::CommState NcclMembers::state() const {
  CommState worst{nccl_abi::kSuccess, nullptr};
  const auto look = [&](NcclLibrary::Comm comm) {
    if (comm == nullptr) return nccl_abi::kSuccess + 0;
    const int state = nccl_->state(comm);
    const bool has_failed = worst.state != nccl_abi::kSuccess && worst.state != nccl_abi::kInProgress;
    if (worst.comm == nullptr || (!has_failed && state != nccl_abi::kSuccess)) worst = {state, comm};
    return state;
  };
  for (const Member& member : members_) {
    if (look(member.parent) != nccl_abi::kInProgress) look(member.comm);  // else NCCL may be writing it
  }
  return worst;
}

void NcclMembers::join_streams() const {
  for (std::size_t i = 1; i < members_.size(); ++i) {
    const OnDevice on(*gpu_, members_[i].device);
    // An event can be recorded only in a stream of its own device, but a stream of any device can wait for it.
    const std::shared_ptr<GpuEvent> given = members_[i].events->take();
    given->record(members_[i].stream->get());
    const OnDevice on_first(*gpu_, first().device);
    given->make_wait(first().stream->get());
  }
}

std::vector<int> NcclMembers::devices_of(StreamHandle stream) const {
  // The handle of a default stream stands for one stream on each device. All of them wait.
  if (stream > kLastDefaultStream) return {first().device};
  std::vector<int> devices;
  for (const Member& member : members_) devices.push_back(member.device);
  return devices;
}

void NcclMembers::abort() noexcept {
  abort_parents();
  end_all(&Member::comm, &NcclLibrary::abort);
  record_ends();
}

void NcclMembers::record_ends() noexcept {
  std::vector<std::shared_ptr<GpuEvent>> ends;
  try {
    for (const Member& member : members_) {
      const OnDevice on(*gpu_, member.device);
      ends.push_back(member.events->take());
      ends.back()->record(member.stream->get());
    }
  } catch (const Error&) {  // the device is lost
    return;
  }
  ends_ = std::move(ends);
}

bool NcclMembers::have_ended() const {
  try {
    return !ends_.empty() && std::ranges::all_of(ends_, [](const auto& end) { return end->is_complete(); });
  } catch (const Error&) {  // the device is lost
    return false;
  }
}

void NcclMembers::destroy() noexcept {
  const int now = state().state;
  if (now != nccl_abi::kSuccess) return abort();  // NCCL would stay in a group, and launch nothing more in this thread
  end_all(&Member::comm, &NcclLibrary::destroy);
  end_all(&Member::parent, &NcclLibrary::destroy);
}

void NcclMembers::end_all(NcclLibrary::Comm Member::* which,
                          void (NcclLibrary::*end)(NcclLibrary::Comm) const noexcept) noexcept {
  const NcclLibrary& nccl = *nccl_;
  if (std::ranges::none_of(members_, [which](const Member& member) { return member.*which != nullptr; })) return;
  // In a group, because each may wait for the others of this process; NCCL demands it for ncclCommFinalize, which is a
  // part of this.
  try {
    NcclGroup group(nccl);
    for (Member& member : members_) {
      if (member.*which != nullptr) (nccl.*end)(std::exchange(member.*which, nullptr));
    }
    group.end(nullptr);
  } catch (const Error&) {  // they have ended all the same
  }
}

}  // namespace samestep
