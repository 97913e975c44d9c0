#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "os/fd.h"

namespace samestep {

/// Reports which of many descriptors may have become ready. Edge-triggered: each change is reported once.
class Poller {
 public:
  struct Event {
    std::size_t number;  ///< as given to `add`
    bool readable, writable, hung_up;
  };

  Poller();
  void add(int fd, std::size_t number);
  /// The changes since the last call, up to the size of the span. Does not wait.
  std::span<const Event> poll(std::span<Event> room);
  /// A descriptor that is readable while there is an event.
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
};

/// Sleeps until the descriptor is readable, or optionally writable, for at most `most`.
void wait_until_ready(int fd, bool to_write, std::chrono::milliseconds most);

}  // namespace samestep
