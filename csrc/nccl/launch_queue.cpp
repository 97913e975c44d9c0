#include "nccl/launch_queue.h"

#include <chrono>
#include <map>
#include <thread>

namespace samestep {
namespace {

constexpr std::chrono::seconds kThreadStays{1};  // after the last launch that had to wait for others

}  // namespace

LaunchQueue& LaunchQueue::of(const GpuLibrary& gpu, int device) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<std::pair<const GpuLibrary*, int>, LaunchQueue>;  // its threads may outlive the rest
  const std::lock_guard lock(mutex);
  return all[{&gpu, device}];
}

bool LaunchQueue::begin() {
  const std::lock_guard lock(mutex_);
  if (launching_ || !queue_.empty()) return false;
  return launching_ = true;
}

void LaunchQueue::end() {
  const std::lock_guard lock(mutex_);
  launching_ = false;
  if (!queue_.empty()) changed_.notify_all();
}

void LaunchQueue::push(std::function<void()> launch) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(launch));
  changed_.notify_all();
  if (std::exchange(has_thread_, true)) return;
  std::thread([this] { run(); }).detach();
}

void LaunchQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kThreadStays, [this] { return !queue_.empty() && !launching_; });
    if (queue_.empty()) break;
    if (launching_) continue;
    std::function<void()> next = std::move(queue_.front());
    queue_.pop_front();
    launching_ = true;
    lock.unlock();
    next();
    lock.lock();
    launching_ = false;
    lock.unlock();
    next = nullptr;  // perhaps the last pointer to a group, whose end takes its time
    lock.lock();
  }
  has_thread_ = false;
}

}  // namespace samestep
