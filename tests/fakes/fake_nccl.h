#pragma once

// What the sources of the stand-in of NCCL share: the communicators of this process, and the group that a thread is in.

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_communicator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

using CommPtr = std::shared_ptr<Comm>;
inline std::mutex comms_mutex;
inline std::vector<CommPtr>& comms() {
  static auto& all = *new std::vector<CommPtr>;
  return all;
}
inline CommPtr find(void* handle) {
  const std::lock_guard lock(comms_mutex);
  for (const CommPtr& comm : comms()) {
    if (comm.get() == handle) return comm;
  }
  return nullptr;
}
inline void forget(void* handle) {
  const std::lock_guard lock(comms_mutex);
  for (auto it = comms().begin(); it != comms().end(); ++it) {
    if (it->get() == handle) {
      comms().erase(it);
      return;
    }
  }
}

/// Communicators of the clique of `comm` that the same thread has made.
inline std::vector<CommPtr> siblings_of(const Comm& comm) {
  std::vector<CommPtr> found;
  const std::lock_guard lock(comms_mutex);
  for (const CommPtr& other : comms()) {
    if (other->path == comm.path && other->maker == comm.maker) found.push_back(other);
  }
  return found;
}

/// A thread is in a call for as long as this lives.
class Inside {
 public:
  explicit Inside(CommPtr comm) : comm_(std::move(comm)) { ++comm_->n_inside; }
  Inside(const Inside&) = delete;
  ~Inside() { --comm_->n_inside; }

 private:
  CommPtr comm_;
};

struct Launch {
  CommPtr comm;
  void* stream;
  Task task;
};
inline thread_local int group_depth = 0;
inline thread_local std::vector<Launch> group;
inline thread_local int group_error = kSuccess;
inline thread_local std::vector<CommPtr> group_inits, group_ends;
inline thread_local std::string last_error;

inline int refuse(int code, const std::string& why) {
  last_error = why;
  if (group_depth > 0) group_error = code;
  return code;
}

/// Begins what the group of this thread has launched.
int launch_group();

}  // namespace fake
