#pragma once

// What the sources of the stand-in of the GPU runtime share.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_capture.h"
#include "fake_streams.h"

#ifdef FAKE_HIP
#define GPU(name) hip##name
#define GPU_HOST_ALLOC hipHostMalloc
#define GPU_HOST_FREE hipHostFree
#else
#define GPU(name) cuda##name
#define GPU_HOST_ALLOC cudaHostAlloc
#define GPU_HOST_FREE cudaFreeHost
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

struct Block {
  char* seen;   // what the caller holds
  char* bytes;  // where the elements are
  std::size_t nbytes;
  int device;                              // -1: pinned memory of the host
  std::shared_ptr<void> mapped = nullptr;  // the memory: of a device, held also by copies that have not run yet
};

// Never destroyed: threads of streams may run when the process ends.
struct World {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<void*, std::shared_ptr<Stream>> destroyed;                       // whose work has not ended
  std::map<int, std::shared_ptr<Stream>> default_streams;                   // of each device
  std::map<std::pair<int, std::thread::id>, std::shared_ptr<Stream>> mine;  // of each device and thread
  std::map<void*, std::shared_ptr<Event>> events;
};
inline World& world() {
  static auto& only = *new World;
  return only;
}

inline int n_devices() { return static_cast<int>(setting("FAKE_GPU_DEVICES", 4)); }

// ---- contexts: each device has one, made by the first call that works on it

inline constexpr int kMostDevices = 64, kDeepest = 32;
struct Contexts {
  std::atomic<bool> exist[kMostDevices];
  std::atomic<int> only{-1};  // where alone one may exist; -1: anywhere
};
inline Contexts& contexts() {
  static auto& all = *new Contexts{};
  return all;
}
inline void make_context(int device) {
  contexts().exist[device] = true;
  if (contexts().only < 0 || contexts().only == device) return;
  std::fprintf(stderr, "fake: a context on device %d, in a process that uses device %d\n", device,
               contexts().only.load());
  std::abort();
}

/// What is current in a thread.
struct Current {
  int chosen = 0;       // by SetDevice
  int stack[kDeepest];  // of contexts
  int n = 0;
};
inline thread_local Current current;

/// The device that GetDevice gives.
inline int device_of_thread() { return current.n != 0 ? current.stack[current.n - 1] : current.chosen; }
/// The device of a call, which makes a context there if the thread has none.
inline int use_device() {
  if (current.n == 0) {
    make_context(current.chosen);
    current.stack[current.n++] = current.chosen;
  }
  return current.stack[current.n - 1];
}

// ---- errors, as the runtime keeps them for each thread

inline thread_local int last_error = kSuccess;
/// An error of the device that no call gets rid of, such as 700; 0 if there is none.
inline std::atomic<int>& sticky_error() {
  static std::atomic<int> code{kSuccess};
  return code;
}
/// What a call returns: notes an error for GetLastError.
inline int ended(int code) {
  use_device();
  if (sticky_error() != kSuccess) code = sticky_error();
#ifdef FAKE_HIP
  if (code != kSuccess) last_error = code;
#else
  if (code != kSuccess && code != kNotReady) last_error = code;  // which HIP notes, too
#endif
  return code;
}

/// Bytes copied between the host and devices.
inline std::atomic<long>& n_crossed() {
  static std::atomic<long> n{0};
  return n;
}

/// Bytes of the longest of them since it was asked for last.
inline std::atomic<long>& longest_copy() {
  static std::atomic<long> n{0};
  return n;
}

/// Calls of this process that what is done again and again makes do without.
inline std::atomic<long>& n_pinned() {
  static std::atomic<long> n{0};
  return n;
}
inline std::atomic<long>& n_allocated() {
  static std::atomic<long> n{0};
  return n;
}
inline std::atomic<long>& n_synchronized() {
  static std::atomic<long> n{0};
  return n;
}

/// What this process has asked for, by what it costs: blocks of memory, streams, events, waits of the host.
struct Made {
  std::atomic<long> blocks{0}, streams{0}, events{0}, waits{0};
};
inline Made& made() {
  static auto& only = *new Made;
  return only;
}

/// Calls that block while tests hold them, as those of a driver may.
struct Queries {
  std::atomic<bool> held{false};
  std::atomic<long> n_held{0};
  void await_release() {
    if (!held) return;
    ++n_held;
    while (held) std::this_thread::sleep_for(std::chrono::microseconds(50));
    --n_held;
  }
};
/// Of events.
inline Queries& queries() {
  static auto& only = *new Queries;
  return only;
}
/// Of addresses, and of captures of streams.
inline Queries& looks() {
  static auto& only = *new Queries;
  return only;
}

// ---- streams

inline constexpr std::uintptr_t kPerThreadStream = 2;

/// The stream behind a handle; null if there is none. 0, and with CUDA 1, is the legacy default stream of the current
/// device.
inline std::shared_ptr<Stream> stream_of(void* handle) {
  const std::lock_guard lock(world().mutex);
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
#ifdef FAKE_HIP
  if (number == 1) return nullptr;  // only later versions have hipStreamLegacy
#endif
  if (number <= kPerThreadStream) {
    auto& stream = number < kPerThreadStream ? world().default_streams[use_device()]
                                             : world().mine[{use_device(), std::this_thread::get_id()}];
    if (!stream) stream = std::make_shared<Stream>(use_device(), false, /*is_legacy=*/number < kPerThreadStream);
    return stream;
  }
  const auto found = world().streams.find(handle);
  return found == world().streams.end() ? nullptr : found->second;
}

inline std::shared_ptr<Event> event_of(void* handle) {
  const std::lock_guard lock(world().mutex);
  const auto found = world().events.find(handle);
  return found == world().events.end() ? nullptr : found->second;
}

inline std::vector<std::shared_ptr<Stream>> all_streams() {
  std::vector<std::shared_ptr<Stream>> all;
  const std::lock_guard lock(world().mutex);
  for (auto& [_, stream] : world().streams) all.push_back(stream);
  for (auto& [_, stream] : world().destroyed) all.push_back(stream);
  for (auto& [_, stream] : world().default_streams) all.push_back(stream);
  for (auto& [_, stream] : world().mine) all.push_back(stream);
  return all;
}

/// Puts work at the end of a stream, or into the graph that it is captured into.
int submit(const std::shared_ptr<Stream>& stream, std::function<void()> work, bool writes = false);

}  // namespace fake
