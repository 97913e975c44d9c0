#include "exchange/requests.h"

#include <algorithm>

namespace samestep {

void Requests::send(Messenger& messenger, const void* data, std::size_t nbytes, int dest, int tag, std::size_t most) {
  most = std::min(most, messenger.max_message());
  const auto* bytes = static_cast<const std::byte*>(data);
  for (std::size_t at = 0; at < nbytes; at += most) {
    const std::size_t piece = std::min(most, nbytes - at);
    entries_.push_back({messenger.send(bytes + at, piece, dest, tag), false});
  }
}

void Requests::receive(Messenger& messenger, void* data, std::size_t nbytes, int source, int tag, std::size_t most) {
  most = std::min(most, messenger.max_message());
  auto* bytes = static_cast<std::byte*>(data);
  for (std::size_t at = 0; at < nbytes; at += most) {
    const std::size_t piece = std::min(most, nbytes - at);
    entries_.push_back({messenger.receive(bytes + at, piece, source, tag), true});
  }
}

bool Requests::test(Messenger& messenger) {
  for (; next_ < entries_.size() && messenger.test(entries_[next_].request); ++next_) messenger.count_ended();
  if (next_ < entries_.size()) return false;
  entries_.clear();
  next_ = 0;
  return true;
}

void Requests::abandon(Messenger& messenger) {
  for (Entry& entry : entries_) {
    if (entry.receives && entry.request.active) messenger.cancel(entry.request);
  }
  entries_.clear();
  next_ = 0;
}

}  // namespace samestep
