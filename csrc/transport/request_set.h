#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/transport.h"

namespace samestep {

/// Sends and receives that complete together. Splits data that exceed the transport's largest message, or `most` bytes,
/// into several messages; sender and receiver split at the same offsets.
class RequestSet {
 public:
  void send(Transport& transport, const void* data, std::size_t nbytes, int dest, int tag, std::size_t most = SIZE_MAX);
  void receive(Transport& transport, void* data, std::size_t nbytes, int source, int tag, std::size_t most = SIZE_MAX);

  /// True once all have completed.
  bool test(Transport& transport);

  /// Cancels the receives that can still be cancelled, and drops the others.
  void abandon(Transport& transport);

 private:
  struct Entry {
    Transport::Request request;
    bool receives;
  };
  std::vector<Entry> entries_;
  std::size_t next_ = 0;  // all before it have completed
};

}  // namespace samestep
