#pragma once

#include <memory>
#include <vector>

#include "gpu/event_pool.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// The devices of one rank in an NCCL clique, with a communicator and a stream for each. Most groups have one device.
///
/// With L devices on each of n ranks NCCL sees n * L members; device j of rank k is member k * L + j.
///
/// Communicators are made non-blocking, so that their start can be interrupted. What launches operations is a blocking
/// communicator split off each: NCCL starts a thread for every launch of a non-blocking one. Before 2.18, where nothing
/// can be split off, the non-blocking one is used, and starts a thread only to connect.
class NcclMembers {
 public:
  struct Member {
    int device;
    std::unique_ptr<GpuStream> stream;
    std::shared_ptr<EventPool> events;
    NcclLibrary::Comm parent = nullptr;
    NcclLibrary::Comm comm = nullptr;  ///< what operations use
  };
  /// A result of `NcclLibrary::state`, and the communicator that it is about.
  struct CommState {
    int state;
    NcclLibrary::Comm comm;
  };

  NcclMembers(std::shared_ptr<GpuLibrary> gpu, std::shared_ptr<NcclLibrary> nccl, const std::vector<int>& devices);

  const std::vector<Member>& all() const { return members_; }
  const Member& first() const { return members_[0]; }

  /// Starts to make the communicators; `state` reports completion.
  void init(int n_ranks, const nccl_abi::UniqueId& id, int rank);
  /// The second step: starts to make those that operations use.
  void split(int rank);
  /// Can NCCL be interrupted through other communicators than those that operations use?
  bool has_parents() const { return members_[0].parent != nullptr; }
  /// The worst state of all communicators: an error, else in progress, else success.
  CommState state() const;

  /// Lets later work in the first stream wait for the work that the other streams have so far.
  void join_streams() const;
  /// Devices to which a stream with this handle may belong: each device has its own default stream.
  std::vector<int> devices_of(StreamHandle stream) const;

  // Each ends the communicators for good. They may block: NCCL waits for the devices, and `destroy` for other ranks.
  /// Interrupts calls and kernels, also while other threads are in calls.
  void abort_parents() noexcept { end_all(&Member::parent, &NcclLibrary::abort); }
  void abort() noexcept;
  /// Aborts those that have failed.
  void destroy() noexcept;
  /// Whether the streams have done all that they had when `abort` returned. False before, and if the device is lost.
  bool have_ended() const;

 private:
  void record_ends() noexcept;
  void end_all(NcclLibrary::Comm Member::* which, void (NcclLibrary::*end)(NcclLibrary::Comm) const noexcept) noexcept;

  std::shared_ptr<GpuLibrary> gpu_;
  std::shared_ptr<NcclLibrary> nccl_;
  std::vector<Member> members_;                  // never moved: NCCL keeps addresses of communicators
  std::vector<std::shared_ptr<GpuEvent>> ends_;  // of the streams, once their communicators have been aborted
};

}  // namespace samestep
