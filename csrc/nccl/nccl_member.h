#pragma once

#include <memory>

#include "gpu/gpu_memory.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// This rank's device in NCCL: its communicators, and the stream in which operations run.
///
/// The communicator that NCCL starts is non-blocking, so that the start can be interrupted. What launches operations is
/// a blocking one split off it: NCCL starts a thread for every launch of a non-blocking one.
class NcclMember {
 public:
  /// A result of `NcclLibrary::state`, and the communicator that it is about.
  struct CommState {
    int state;
    NcclLibrary::Comm comm;
  };

  NcclMember(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl, int device);

  GpuLibrary::Stream stream() const { return stream_->get(); }
  EventPool& events() const { return *events_; }
  /// What operations use.
  NcclLibrary::Comm comm() const { return comm_; }

  /// Starts to make the communicator; `state` reports completion.
  void init(int n_ranks, const nccl_abi::UniqueId& id, int rank);
  /// The second step: starts to make the one that operations use.
  void split(int rank);
  /// The worst state of both communicators: an error, else in progress, else success.
  CommState state() const;

  // Each ends the communicators for good. They may block: NCCL waits for the device, and `destroy` for other ranks.
  /// Interrupts calls and kernels, also while other threads are in calls.
  void abort_parent() noexcept { end(parent_, &NcclLibrary::abort); }
  void abort() noexcept;
  /// Aborts what has failed.
  void destroy() noexcept;
  /// Whether the stream has done all that it had when `abort` returned. False before, and if the device is lost.
  bool has_ended() const;

 private:
  void end(NcclLibrary::Comm& comm, void (NcclLibrary::*how)(NcclLibrary::Comm) const noexcept) const noexcept;

  std::shared_ptr<GpuLibrary> gpu_;
  std::shared_ptr<NcclLibrary> nccl_;
  int device_;
  std::unique_ptr<GpuStream> stream_;
  std::shared_ptr<EventPool> events_;
  NcclLibrary::Comm parent_ = nullptr, comm_ = nullptr;
  std::shared_ptr<GpuEvent> end_;  // of the stream, once the communicators have been aborted
};

}  // namespace samestep
