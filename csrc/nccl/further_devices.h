#pragma once

#include <memory>
#include <vector>

#include "nccl/gpu_memory.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// The communicators of one rank on further devices, beside the one on its first device, each with a stream. Most
/// groups have none.
///
/// With L devices on each of n ranks NCCL sees n * L members; device j of rank k is member k * L + j.
class FurtherDevices {
 public:
  struct Member {
    int device;
    std::unique_ptr<GpuStream> stream;
    NcclLibrary::Comm comm = nullptr;
  };
  /// A state as `NcclLibrary::state` tells it, and whose it is.
  struct Standing {
    int state;
    NcclLibrary::Comm comm;
  };

  FurtherDevices(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl, const std::vector<int>& devices);

  const std::vector<Member>& members() const { return members_; }

  /// Begins to make all communicators of this rank, `first` on the current device.
  void init(NcclLibrary::Comm& first, int n_ranks, const nccl_abi::UniqueId& id, int rank);
  /// Of the worst: what has gone wrong in one of them, else what is in progress, else success.
  Standing standing(NcclLibrary::Comm first) const;
  /// What `to` is given from now on, on the first device, comes after what all the others have been given so far.
  void order_before(GpuLibrary::Stream to) const;
  /// Devices in which a stream may be the one of this handle: the default one is another in each.
  std::vector<int> devices_of(StreamHandle stream, int first) const;

  /// End all communicators of this rank, of which `first` is on the first device; null where it is none.
  void abort(NcclLibrary::Comm first) noexcept { end_all(first, &NcclLibrary::abort); }
  void destroy(NcclLibrary::Comm first) noexcept { end_all(first, &NcclLibrary::destroy); }

 private:
  void end_all(NcclLibrary::Comm first, void (NcclLibrary::*end)(NcclLibrary::Comm) const noexcept) noexcept;

  std::shared_ptr<GpuLibrary> gpu_;
  std::shared_ptr<NcclLibrary> nccl_;
  std::vector<Member> members_;  // never moved: NCCL keeps addresses of `comm`
};

}  // namespace samestep
