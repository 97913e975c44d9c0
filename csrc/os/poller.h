#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "os/fd.h"

namespace samestep {

/// Tells which of many descriptors may have become ready. Edge-triggered: each change is told once.
class Poller {
 public:
  struct Event {
    std::size_t number;  ///< as given to `add`
    bool readable, writable, hung_up;
  };

  Poller();
  void add(int fd, std::size_t number);
  /// What has changed since the last call, as far as there is room for it. Does not wait.
  std::span<const Event> poll(std::span<Event> room);
  /// Ready to be read when there is an event.
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
};

/// Sleeps until the descriptor can be read, or also written, for `most` at most.
void wait_until_ready(int fd, bool to_write, std::chrono::milliseconds most);

}  // namespace samestep
