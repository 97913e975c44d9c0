#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device_communicator.h"
#include "nccl/nccl_comm.h"

namespace samestep {

/// Operations on device memory through NCCL. Ranks compare each of them on the host, beside it. Buffers have been
/// checked.
class DeviceCommunicator::NcclPath {
 public:
  NcclPath(std::shared_ptr<NcclComm> comm, int rank, int size);

  const std::shared_ptr<NcclComm>& comm() const { return comm_; }
  /// Whether NCCL has this operation, or the parts to make it of.
  bool has(const CollectiveArgs& args) const;
  WorkPtr start(const CollectiveArgs& args, NcclLaunch::Where where);
  /// In the stream of the arrays. See NcclComm.
  WorkPtr run(const CollectiveArgs& args, NcclLaunch::Where where);
  /// An allreduce or bcast of many arrays as one operation.
  WorkPtr start_many(CollectiveArgs args, std::vector<InOut> buffers, NcclLaunch::Where where);
  /// Takes the place of an operation. The others, who begin it, get the error.
  void refuse();

  /// How many operations have been called, refusals among them.
  std::uint64_t n_launched() const { return n_launched_; }
  std::uint64_t n_launched_bytes() const { return n_launched_bytes_; }

 private:
  NcclLaunch launch_of(const CollectiveArgs& args, NcclLaunch::Where where);
  void count(std::size_t nbytes);

  std::shared_ptr<NcclComm> comm_;
  std::shared_ptr<BufferPool> copies_;  // of inputs that overlap their outputs
  int rank_, size_;
  std::atomic<std::uint64_t> n_launched_ = 0, n_launched_bytes_ = 0;  // for `counters` alone: pair with nothing
};

}  // namespace samestep
