#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "communicator/communicator.h"
#include "nccl/packed_calls.h"

namespace samestep {

/// How the ranks of one group pack small arrays. At the first use they agree on it: a rank whose device has no kernels
/// would otherwise do something else than its peers.
class DevicePacking {
 public:
  /// `packer` may be null. `below`: leaves of as many bytes or more are not packed; 0 for none.
  DevicePacking(std::shared_ptr<GpuLibrary> gpu, int device, std::shared_ptr<Packer> packer, std::size_t below)
      : gpu_(std::move(gpu)), device_(device), packer_(std::move(packer)), below_(below) {}

  /// What is packed of leaves of these sizes, the same on all ranks; nothing if that would not pay, or not all ranks
  /// can. The first call waits on the host for all ranks, whose group `agreement` is; it throws what that throws.
  std::optional<nccl_calls::Packing> plan(std::span<const std::size_t> leaf_nbytes, Communicator& agreement,
                                          const Deadline& deadline);
  /// Lets this rank ask for another limit than it was made with, until the first use.
  void ask_for(std::size_t below) { below_ = below; }

 private:
  static constexpr std::size_t kBucket = std::size_t{32} << 20;  // bytes, of device memory, for the group's life

  std::size_t mine();

  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  std::shared_ptr<Packer> packer_;
  std::size_t below_;
  std::optional<std::size_t> agreed_;
  std::shared_ptr<void> bucket_;
};

}  // namespace samestep
