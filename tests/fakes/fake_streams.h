#pragma once

// Streams and events of the stand-in of the GPU runtime.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "fake_capture.h"
#include "fake_gpu.h"

namespace fake {

inline long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

inline constexpr unsigned kOneIn = 8;        // things in a stream that are delayed
inline constexpr long kLongestQueue = 1000;  // about what CUDA takes before the caller waits

struct Stream;
inline thread_local Stream* current_stream = nullptr;
/// Things that streams have done.
inline std::atomic<unsigned long>& n_steps() {
  static std::atomic<unsigned long> n{0};
  return n;
}

/// Calls that are waiting for a stream to end.
inline std::atomic<long>& n_drains() {
  static std::atomic<long> n{0};
  return n;
}

struct Stream {
  Stream(int on, bool by_library, bool legacy = false) : device(on), of_library(by_library), is_legacy(legacy) {}
  /// Blocks while the queue is full. `writes`: to device memory, which tests may hold up in streams of the package.
  void enqueue(std::function<void()> work, bool writes = false) {
    static const auto longest_queue = static_cast<std::size_t>(setting("FAKE_GPU_QUEUE", kLongestQueue));
    std::unique_lock lock(mutex);
    if (!thread.joinable()) thread = std::thread([this] { run(); });
    changed.wait(lock, [this] { return queue.size() < longest_queue; });
    if (writes && of_library) put([] { pass(writes_are_held()); });
    put(std::move(work));
    changed.notify_all();
  }
  /// What has been put into this stream so far.
  std::uint64_t put_so_far() {
    const std::lock_guard lock(mutex);
    return n_put;
  }
  /// Waits until so much has been done, from the thread of another stream.
  void wait_until_done(std::uint64_t number) {
    const Stuck stuck([this, number] {
      const std::lock_guard lock(mutex);
      return n_done >= number;
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return n_done >= number; });
  }
  /// Waits in this stream until `gate` is open.
  static void pass(const std::atomic<bool>& gate) {
    const Stuck stuck([&gate] { return !gate; });
    while (gate) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  static std::atomic<bool>& writes_are_held() {
    static std::atomic<bool> held{false};
    return held;
  }
  void stick(std::function<bool()> until) {
    const std::lock_guard lock(stuck_mutex);
    stuck_until = std::move(until);
  }
  bool stuck() {
    const std::lock_guard lock(stuck_mutex);
    return stuck_until && !stuck_until();
  }
  bool idle() {
    const std::lock_guard lock(mutex);
    return queue.empty() && !busy;
  }
  void drain() {
    std::unique_lock lock(mutex);
    if (queue.empty() && !busy) return;
    ++n_drains();
    changed.wait(lock, [this] { return queue.empty() && !busy; });
    --n_drains();
  }
  void end() {
    {
      const std::lock_guard lock(mutex);
      ending = true;
      changed.notify_all();
    }
    if (thread.joinable()) thread.join();
  }

  std::atomic<bool> held{false};
  const int device;
  const bool of_library;  // made with the flag that the package gives and the tests do not: waits for no legacy stream
  const bool is_legacy;
  std::shared_ptr<Capture> capture;  // guarded by the mutex of captures()

 private:
  void put(std::function<void()> work) {
    queue.push_back(std::move(work));
    ++n_put;
  }
  void run() {
    current_stream = this;
    std::mt19937 random(std::random_device{}());
    const long longest = setting("FAKE_GPU_DELAY_US", 0);
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !queue.empty() || ending; });
      if (queue.empty()) return;
      const std::function<void()> work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      if (longest > 0 && random() % kOneIn == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(longest)));
      work();
      ++n_steps();
      lock.lock();
      busy = false;
      ++n_done;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;
  bool busy = false, ending = false;
  std::uint64_t n_put = 0, n_done = 0;
  std::mutex stuck_mutex;
  std::function<bool()> stuck_until;
};

/// One recording of an event. What waits for it waits for this one, even if the event is recorded again meanwhile, in a
/// stream that gets there sooner.
struct Record {
  void happen() {
    const std::lock_guard lock(mutex);
    happened = true;
    changed.notify_all();
  }
  bool has_happened() {
    const std::lock_guard lock(mutex);
    return happened;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return happened; });
  }

 private:
  std::mutex mutex;
  std::condition_variable changed;
  bool happened = false;
};

struct Event {
  explicit Event(int on) : device(on) {}

  const int device;  // whose streams can record it
  std::mutex mutex;
  std::shared_ptr<Record> last;  // null: never recorded
  // Guarded by the mutex of captures(): what it was recorded in last, if that was a capture.
  std::shared_ptr<Capture> capture;
  const Stream* captured_in = nullptr;
  long captured_at = 0;  // things of that stream before it
  std::shared_ptr<Record> last_record() {
    const std::lock_guard lock(mutex);
    return last;
  }
};

}  // namespace fake
