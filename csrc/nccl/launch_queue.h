#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "gpu/gpu_library.h"

namespace samestep {

/// The order in which the operations of all communicators of a device are launched: that of the calls, one at a time.
///
/// Ranks that launch operations of two communicators in opposite orders wait for each other where kernels of a device
/// run one after the other. So what may have to wait for other ranks in NCCL keeps back what is called after it, of any
/// communicator. A thread makes such calls, so that the caller does not wait.
class LaunchQueue {
 public:
  /// That of `device`, for the life of the process.
  static LaunchQueue& of(const GpuLibrary& gpu, int device);

  /// Runs `launch`, which must not throw: at once if nothing is queued and it waits for nobody, else in the thread.
  template <class Launch>
  void add(Launch launch, bool waits_for_nobody) {
    if (waits_for_nobody && begin()) {
      launch();
      end();
    } else {
      push(std::move(launch));
    }
  }

 private:
  /// False if something is queued or being launched.
  bool begin();
  void end();
  void push(std::function<void()> launch);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool launching_ = false;   // a thread is in a launch, without the mutex
  bool has_thread_ = false;  // which ends when nothing has arrived for a while
};

}  // namespace samestep
