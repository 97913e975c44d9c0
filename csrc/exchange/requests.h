#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange/messenger.h"

namespace samestep {

/// A bundle of sends and receives that is finished when all of them are. Cuts what is longer than the
/// messenger's longest message, or than `most`, into pieces; both sides cut alike.
class Requests {
 public:
  void send(Messenger& messenger, const void* data, std::size_t nbytes, int dest, int tag, std::size_t most = SIZE_MAX);
  void receive(Messenger& messenger, void* data, std::size_t nbytes, int source, int tag, std::size_t most = SIZE_MAX);

  /// True once all have ended.
  bool test(Messenger& messenger);

  /// Gives up the receives among them that can be given up, and forgets the rest.
  void abandon(Messenger& messenger);

 private:
  struct Entry {
    Messenger::Request request;
    bool receives;
  };
  std::vector<Entry> entries_;
  std::size_t next_ = 0;  // all before it have ended
};

}  // namespace samestep
