#include "node/direct_movement.h"

#include <algorithm>

#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kChunk = 1 << 20;  // each call of the kernel costs a microsecond
constexpr int kChunksAtOnce = 8;         // then others may have their turn

}  // namespace

void DirectMovement::copy_parts(const Run& run, std::size_t first, std::size_t n, std::size_t of) {
  constexpr std::size_t kPage = 4096;
  const std::size_t part = (run.nbytes / of + kPage) / kPage * kPage;
  const std::size_t begin = std::min(first * part, run.nbytes);
  const std::size_t end = first + n == of ? run.nbytes : std::min((first + n) * part, run.nbytes);
  parts_.push_back({run, begin, end});
}

void DirectMovement::copy_chunk(const Run& run, std::size_t begin, std::size_t nbytes) {
  Host& host = *group_.host;
  const int member = group_.member(run.peer);
  if (std::byte* const there = host.at(member, run.theirs, run.nbytes); there != nullptr) {
    std::byte* const to = run.outgoing ? there + begin : run.mine + begin;
    const std::byte* const from = run.outgoing ? run.mine + begin : there + begin;
    return kernels::copy_part(to, from, nbytes, touched_);
  }
  const bool moved = run.outgoing ? host.push(member, run.theirs + begin, run.mine + begin, nbytes)
                                  : host.pull(member, run.mine + begin, run.theirs + begin, nbytes);
  if (!moved) throw Unreachable();
}

bool DirectMovement::work() {
  if (stuck_) return false;
  for (int i = 0; i < kChunksAtOnce; ++i) {
    while (at_ < parts_.size() && parts_[at_].begin == parts_[at_].end) ++at_;
    if (at_ == parts_.size()) return true;
    Part& part = parts_[at_];
    const std::size_t nbytes = std::min(kChunk, part.end - part.begin);
    try {
      copy_chunk(part.run, part.begin, nbytes);
    } catch (const Unreachable&) {
      stuck_ = true;
      return false;
    }
    part.begin += nbytes;
    ++n_copied_;
  }
  return false;
}

}  // namespace samestep
