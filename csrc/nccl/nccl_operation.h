#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "nccl/nccl_channel.h"

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

/// One operation of a channel, for the thread that watches it and for who waits for it. Takes what it needs of
/// `launch`, which keeps its calls.
struct NcclChannel::Operation {
  Operation(NcclLaunch& launch, std::uint64_t number, const Deadline& until, std::unique_ptr<GpuEvent> at_end)
      : what(std::move(launch.what)),
        sequence(number),
        deadline(until),
        end(std::move(at_end)),
        agreement(std::move(launch.agreement)),
        memory(std::move(launch.memory)) {}

  std::string what;
  std::uint64_t sequence;
  Clock::time_point started = Clock::now();
  Deadline deadline;
  std::unique_ptr<GpuEvent> end;
  Communicator::WorkPtr agreement;
  std::vector<std::shared_ptr<void>> memory;
  bool launched = false;               // NCCL has put all of it into the stream
  std::exception_ptr error = nullptr;  // set before `ended`
  std::atomic<bool> ended = false;

  void finish(std::exception_ptr with) {
    if (ended) return;
    error = std::move(with);
    ended = true;
  }
};

}  // namespace samestep
