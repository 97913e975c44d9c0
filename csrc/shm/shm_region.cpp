#include "shm/shm_region.h"

#include <algorithm>
#include <bit>

#include "os/futex.h"
#include "shm/write_fence.h"

namespace samestep {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

/// The offsets of the parts of a region.
struct Layout {
  std::size_t event_counts, header_slots, steps, next_chunks, finished, released, leave_reasons, rings, blocks, stages,
      fence_words, end;

  explicit Layout(std::size_t size) {
    std::size_t at = 0;
    const auto take = [&at](std::size_t nbytes) {
      const std::size_t begin = at;
      at = whole_pages(at + nbytes);
      return begin;
    };
    event_counts = take((size + 1) * sizeof(ShmRegion::EventCount));
    header_slots = take(ShmRegion::kSlots * size * sizeof(ShmRegion::HeaderSlot));
    steps = take(ShmRegion::kSlots * size * sizeof(ShmRegion::PaddedAtomic));
    next_chunks = take((ShmRegion::kSlots + 1) * sizeof(ShmRegion::PaddedAtomic));
    finished = take(ShmRegion::kSlots * sizeof(ShmRegion::PaddedAtomic));
    released = take(2 * size * sizeof(ShmRegion::PaddedAtomic));
    leave_reasons = take(size * ShmRegion::kLeaveReasonBytes);
    rings = take(size * size * (sizeof(ShmRegion::Ring) + ShmRegion::ring_nbytes(static_cast<int>(size))));
    blocks = take(size * ShmRegion::kBlocks * ShmRegion::kBlockBytes);
    stages = take(size * ShmRegion::kStages * ShmRegion::kStageBytes);
    fence_words = take(WriteFence::nbytes_for(size));
    end = at;
  }
};

}  // namespace

std::size_t ShmRegion::ring_nbytes(int size) {
  // A rank has one ring for each peer, so rings shrink as the group grows. Messages of up to a third of a ring are
  // eager.
  constexpr std::size_t kMaxRing = 256 << 10, kMinRing = 4 << 10, kOfOneRank = 1 << 20;
  return std::clamp(std::bit_floor(kOfOneRank / static_cast<std::size_t>(size)), kMinRing, kMaxRing);
}

std::size_t ShmRegion::nbytes_for(int size) { return Layout(static_cast<std::size_t>(size)).end; }

std::size_t ShmRegion::nbytes_of_event_counts(int size) { return Layout(static_cast<std::size_t>(size)).header_slots; }

ShmRegion::ShmRegion(std::shared_ptr<std::byte> memory, int size)
    : memory_(std::move(memory)), size_(index(size)), ring_nbytes_(ring_nbytes(size)) {
  const Layout layout(size_);
  std::byte* const base = memory_.get();
  event_counts_ = reinterpret_cast<EventCount*>(base + layout.event_counts);
  header_slots_ = reinterpret_cast<HeaderSlot*>(base + layout.header_slots);
  steps_ = reinterpret_cast<PaddedAtomic*>(base + layout.steps);
  next_chunk_ = reinterpret_cast<PaddedAtomic*>(base + layout.next_chunks);
  finished_ = reinterpret_cast<PaddedAtomic*>(base + layout.finished);
  released_ = reinterpret_cast<PaddedAtomic*>(base + layout.released);
  leave_reasons_ = base + layout.leave_reasons;
  rings_ = base + layout.rings;
  blocks_ = base + layout.blocks;
  stages_ = base + layout.stages;
  fence_words_ = base + layout.fence_words;
}

void ShmRegion::wake_waiters(int rank) const {
  for (int peer = 0; peer < size(); ++peer) {
    EventCount& counter = event_count(peer);
    // relaxed: see notify
    if (peer == rank || counter.n_waiters.load(std::memory_order_relaxed) == 0) continue;
    counter.epoch.fetch_add(1, std::memory_order_release);  // pairs with EventCountWaiter::sleep
    futex_wake(counter.epoch);
  }
}

}  // namespace samestep
