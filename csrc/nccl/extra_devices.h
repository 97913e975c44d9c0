#pragma once

#include <memory>
#include <vector>

#include "gpu/gpu_memory.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// The communicators and streams of one rank on devices other than its first. Most groups have none.
///
/// With L devices on each of n ranks NCCL sees n * L members; device j of rank k is member k * L + j.
class ExtraDevices {
 public:
  struct Member {
    int device;
    std::unique_ptr<GpuStream> stream;
    NcclLibrary::Comm comm = nullptr;
  };
  /// A result of `NcclLibrary::state`, and the communicator that it is about.
  struct CommState {
    int state;
    NcclLibrary::Comm comm;
  };

  ExtraDevices(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl, const std::vector<int>& devices);

  const std::vector<Member>& members() const { return members_; }

  /// Starts to make all communicators of this rank; `first` is on the current device.
  void init(NcclLibrary::Comm& first, int n_ranks, const nccl_abi::UniqueId& id, int rank);
  /// The worst state of all communicators: an error, else in progress, else success.
  CommState state(NcclLibrary::Comm first) const;
  /// Lets later work in `to`, on the first device, wait for the work that the other streams have so far.
  void make_stream_wait(GpuLibrary::Stream to) const;
  /// Devices to which a stream with this handle may belong: each device has its own default stream.
  std::vector<int> devices_of(StreamHandle stream, int first) const;

  /// Ends all communicators of this rank; `first` is on the first device, and may be null.
  void abort(NcclLibrary::Comm first) noexcept { end_all(first, &NcclLibrary::abort); }
  void destroy(NcclLibrary::Comm first) noexcept { end_all(first, &NcclLibrary::destroy); }

 private:
  void end_all(NcclLibrary::Comm first, void (NcclLibrary::*end)(NcclLibrary::Comm) const noexcept) noexcept;

  std::shared_ptr<GpuLibrary> gpu_;
  std::shared_ptr<NcclLibrary> nccl_;
  std::vector<Member> members_;  // never moved: NCCL keeps addresses of `comm`
};

}  // namespace samestep
