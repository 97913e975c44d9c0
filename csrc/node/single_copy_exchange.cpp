#include "node/single_copy_exchange.h"

#include <algorithm>

#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kChunk = 1 << 20;  // bytes; each process_vm_readv costs a microsecond
constexpr int kChunksAtOnce = 8;         // then other operations of the group make a step

}  // namespace

void SingleCopyExchange::copy_parts(const Run& run, std::size_t first, std::size_t n, std::size_t of) {
  constexpr std::size_t kPage = 4096;
  // In whole pages, so that no page is the work of two ranks if the block begins at one.
  const std::size_t part = (run.nbytes / of + kPage) / kPage * kPage;
  const std::size_t begin = std::min(first * part, run.nbytes);
  const std::size_t end = first + n == of ? run.nbytes : std::min((first + n) * part, run.nbytes);
  parts_.push_back({run, begin, end});
}

void SingleCopyExchange::copy_chunk(const Run& run, std::size_t begin, std::size_t nbytes) {
  LocalPeers& host = *group_.peers;
  const int member = group_.member(run.peer);
  if (std::byte* const there = host.map_peer_memory(member, run.remote, run.nbytes); there != nullptr) {
    std::byte* const to = run.outgoing ? there + begin : run.local + begin;
    const std::byte* const from = run.outgoing ? run.local + begin : there + begin;
    return kernels::copy_auto(to, from, nbytes, footprint_bytes_);
  }
  const auto peer = static_cast<std::size_t>(run.peer);
  const bool moved = run.outgoing ? group_.fence->write(peer, run.remote + begin, run.local + begin, nbytes)
                                  : host.read_peer(member, run.local + begin, run.remote + begin, nbytes);
  if (!moved) throw PeerMemoryLost();
}

bool SingleCopyExchange::work() {
  if (peer_memory_lost_) return false;
  for (int i = 0; i < kChunksAtOnce; ++i) {
    while (at_ < parts_.size() && parts_[at_].begin == parts_[at_].end) ++at_;
    if (at_ == parts_.size()) return true;
    Part& part = parts_[at_];
    const std::size_t nbytes = std::min(kChunk, part.end - part.begin);
    try {
      copy_chunk(part.run, part.begin, nbytes);
    } catch (const PeerMemoryLost&) {
      // Not an error yet: see PeerMemoryLost. The buffers of the peer are not accessed again.
      peer_memory_lost_ = true;
      return false;
    }
    part.begin += nbytes;
    ++n_copied_;
  }
  return false;
}

}  // namespace samestep
