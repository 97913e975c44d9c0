#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collectives/exchange_communicator.h"
#include "collectives/peer_transfer.h"
#include "device/device_communicator.h"
#include "gpu/staging.h"

namespace samestep {

/// What a group does with device memory without NCCL: staging through pinned memory, or device pointers that a
/// GPU-aware MPI gets. Buffers have been checked.
class DeviceCommunicator::HostPath {
 public:
  /// `messages`: the group of sends and receives. `collectives`: another one of the same ranks.
  HostPath(std::shared_ptr<Communicator> messages, std::shared_ptr<Communicator> collectives,
           const DeviceOptions& options);

  WorkPtr start(const CollectiveArgs& args);
  /// In its turn among the collectives.
  WorkPtr start_refusal();
  /// How many collectives have been called, refusals among them.
  std::uint64_t n_called() const { return n_called_; }
  WorkPtr start(const SendArgs& args);
  WorkPtr start(const RecvArgs& args);
  /// A send of host memory, or of an object, that must start after such sends of device memory as have not started.
  WorkPtr start_behind(const SendArgs& args);
  HostStaging& staging() { return *staging_; }

 private:
  class HostCall;
  using Start = std::function<WorkPtr(ConstBuffer, Buffer)>;

  /// A collective, in windows of each block, or of the array where it has none. Ranks that do not know the lengths of
  /// all blocks exchange them first. `direct_from`: MPI gets the device pointers of windows of so many bytes, if they
  /// are merely moved.
  WorkPtr in_windows(const std::shared_ptr<const HostCall>& call, bool copies_in_first);
  static std::vector<StagedSegment> windows(const std::shared_ptr<const HostCall>& call, const BlockLengths& lengths,
                                            std::size_t longest_segment, std::size_t direct_from);
  /// Messages of more than a segment.
  bool is_segmented(const ConstBuffer& buffer) const;
  WorkPtr in_segments(const SendArgs& args);
  WorkPtr in_segments(const RecvArgs& args);
  WorkPtr start_part(StagedSegment part, StagedOperation call);
  /// `direct`: MPI gets the device pointers.
  WorkPtr whole(ConstBuffer in, Buffer out, bool direct, Start start, StagedOperation call = {});
  /// A collective that only moves data: MPI gets the device pointers if it sends all transfers, else it is staged.
  /// Each rank decides for itself, as the messages are the same.
  WorkPtr exchange(ConstBuffer in, Buffer out, std::span<const PeerTransfer> transfers, Start start);
  /// Lets a rank copy its own part of a collective on the device.
  void copy_local_on_device();

  std::shared_ptr<Communicator> messages_, collectives_;
  std::shared_ptr<ExchangeCommunicator> segmented_;  // `messages_`, or null in a group of one rank
  std::shared_ptr<GpuLibrary> gpu_;
  std::size_t longest_segment_;
  bool some_are_gpu_aware_;  // the same on all ranks, which begin as many operations on the host
  std::shared_ptr<HostStaging> staging_;
  std::atomic<std::uint64_t> n_called_ = 0;
  // MPI gets the device pointers of messages, and of what collectives move, from so many bytes on.
  std::size_t direct_from_ = SIZE_MAX, segment_direct_from_ = SIZE_MAX;
};

}  // namespace samestep
