#pragma once

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

 private:
  Fd fd_;
};

}  // namespace samestep
