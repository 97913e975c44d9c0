#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "nccl/nccl_comm.h"

namespace samestep {

inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

inline bool is_mismatch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const MismatchError&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// An operation of an NcclComm in progress, shared by the watching thread and the callers that wait for it. Moves from
/// `launch` everything but its calls.
struct NcclComm::Operation {
  Operation(NcclLaunch& launch, std::uint64_t number, const Deadline& until, std::unique_ptr<GpuEvent> at_end)
      : what(std::move(launch.what)),
        sequence(number),
        deadline(until),
        end(std::move(at_end)),
        signature_check(std::move(launch.signature_check)),
        memory(std::move(launch.memory)) {}

  std::string what;
  std::uint64_t sequence;
  Clock::time_point started = Clock::now();
  Deadline deadline;
  std::unique_ptr<GpuEvent> end;
  Communicator::WorkPtr signature_check;
  std::vector<std::shared_ptr<void>> memory;
  bool launched = false;               // NCCL has enqueued all of it
  std::exception_ptr error = nullptr;  // set before `ended`
  std::atomic<bool> ended = false;

  void finish(std::exception_ptr with) {
    if (ended) return;
    error = std::move(with);
    ended = true;
  }
};

}  // namespace samestep
