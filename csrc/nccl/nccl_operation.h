#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "nccl/nccl_comm.h"

namespace samestep {

/// An operation of an NcclComm in progress, shared by the threads that launch and watch it and the callers that wait
/// for it.
struct NcclComm::Operation {
  Operation(NcclLaunch&& given, const Deadline& until) : launch(std::move(given)), deadline(until) {}

  NcclLaunch launch;  // `memory` is kept until the end, `calls` until they are made
  std::uint64_t sequence = 0;
  std::uint64_t logged = 0;  // in the CallLog
  Clock::time_point started = Clock::now();
  Clock::time_point peer_lost_at{};  // when that was first seen; guarded by the mutex
  Deadline deadline;                 // the group's, or that of a longer wait; guarded by the mutex
  std::vector<std::shared_ptr<GpuEvent>> after;
  std::shared_ptr<GpuEvent> end;       // set before `launched`; null in a capture
  std::exception_ptr error = nullptr;  // set before `ended`
  // Each is stored after what it tells of, and pairs with loads by waiting threads.
  std::atomic<bool> launched = false;   // NCCL has enqueued all of it
  std::atomic<bool> completed = false;  // the device has finished it
  std::atomic<bool> ended = false;

  bool is_captured() const { return launch.where == NcclLaunch::Where::captured; }
  void finish(std::exception_ptr with) {
    if (ended) return;
    error = std::move(with);
    ended = true;
  }
};

}  // namespace samestep
