#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "communicator/communicator.h"
#include "core/bystanders.h"
#include "nccl/gpu_memory.h"
#include "nccl/nccl_channel.h"

namespace samestep {

/// Launches of a group's channels that begin once all ranks have agreed on them, in the order of the calls. Whoever
/// waits for anything lets those begin that are agreed on, and so does a thread: to free device memory waits for all
/// that has begun, also where another rank does the same before its own part has. Ranks that differ are told by the
/// Work of that operation, of which nothing has begun anywhere.
class ComparedLaunches final : public Bystander, public std::enable_shared_from_this<ComparedLaunches> {
 public:
  static std::shared_ptr<ComparedLaunches> make(std::shared_ptr<NcclChannel> channel);
  ~ComparedLaunches() override;

  /// Comes after what its streams hold now. On the channel that this was made for.
  std::shared_ptr<Work> add(NcclLaunch launch) { return add(std::move(launch), channel_); }
  /// On another one of the same ranks.
  std::shared_ptr<Work> add(NcclLaunch launch, std::shared_ptr<NcclChannel> channel);
  void advance() override;
  /// All that has not begun ends with `error`.
  void abandon(const std::exception_ptr& error);
  bool idle();

 private:
  class ComparedWork;
  class Bell;

  explicit ComparedLaunches(std::shared_ptr<NcclChannel> channel);
  static void launch_when_agreed(std::weak_ptr<ComparedLaunches> launches, std::shared_ptr<Bell> bell);

  std::shared_ptr<NcclChannel> channel_;
  GpuStream produced_;  // has come to the end of what the streams of all calls on `channel_` held
  std::mutex mutex_;
  std::deque<std::shared_ptr<ComparedWork>> waiting_;
  bool launching_ = false;  // a thread is at it, without the mutex
  std::shared_ptr<Bell> bell_;
  std::thread launcher_;
};

}  // namespace samestep
