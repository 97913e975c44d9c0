#include "transport/request_set.h"

#include <algorithm>

namespace samestep {

void RequestSet::send(Transport& transport, const void* data, std::size_t nbytes, int dest, int tag, std::size_t most) {
  // Data of no bytes are no message at all: the receiver, which knows the length, posts no receive either.
  most = std::min(most, transport.max_message());
  const auto* bytes = static_cast<const std::byte*>(data);
  for (std::size_t at = 0; at < nbytes; at += most) {
    const std::size_t piece = std::min(most, nbytes - at);
    entries_.push_back({transport.send(bytes + at, piece, dest, tag), false});
  }
}

void RequestSet::receive(Transport& transport, void* data, std::size_t nbytes, int source, int tag, std::size_t most) {
  most = std::min(most, transport.max_message());
  auto* bytes = static_cast<std::byte*>(data);
  for (std::size_t at = 0; at < nbytes; at += most) {
    const std::size_t piece = std::min(most, nbytes - at);
    entries_.push_back({transport.receive(bytes + at, piece, source, tag), true});
  }
}

bool RequestSet::test(Transport& transport) {
  for (; next_ < entries_.size() && transport.test(entries_[next_].request); ++next_) transport.count_ended();
  if (next_ < entries_.size()) return false;
  entries_.clear();
  next_ = 0;
  return true;
}

void RequestSet::abandon(Transport& transport) {
  for (Entry& entry : entries_) {
    // MPI deprecates the cancellation of sends, and a send that a peer may still read is not over. The memory of sends
    // is kept by the engine instead, see ProgressEngine::leave.
    if (entry.receives && entry.request.active) transport.cancel(entry.request);
  }
  entries_.clear();
  next_ = 0;
}

}  // namespace samestep
