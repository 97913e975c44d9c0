#include "node/arena.h"

#include <algorithm>
#include <bit>

#include "os/futex.h"

namespace samestep {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

/// Where the parts of an arena begin.
struct Layout {
  std::size_t bells, lines, steps, claimed, finished, released, last_words, rings, blocks, stages, end;

  explicit Layout(std::size_t size) {
    std::size_t at = 0;
    const auto take = [&at](std::size_t nbytes) {
      const std::size_t begin = at;
      at = whole_pages(at + nbytes);
      return begin;
    };
    bells = take((size + 1) * sizeof(Arena::Bell));
    lines = take(Arena::kSlots * size * sizeof(Arena::Line));
    steps = take(Arena::kSlots * size * sizeof(Arena::Word));
    claimed = take((Arena::kSlots + 1) * sizeof(Arena::Word));
    finished = take(Arena::kSlots * sizeof(Arena::Word));
    released = take(2 * size * sizeof(Arena::Word));
    last_words = take(size * Arena::kLastWords);
    rings = take(size * size * (sizeof(Arena::Ring) + Arena::ring_nbytes(static_cast<int>(size))));
    blocks = take(size * Arena::kBlocks * Arena::kBlockBytes);
    stages = take(size * Arena::kStages * Arena::kStageBytes);
    end = at;
  }
};

}  // namespace

std::size_t Arena::ring_nbytes(int size) {
  constexpr std::size_t kMost = 256 << 10, kLeast = 4 << 10, kOfOneRank = 1 << 20;
  return std::clamp(std::bit_floor(kOfOneRank / static_cast<std::size_t>(size)), kLeast, kMost);
}

std::size_t Arena::nbytes_for(int size) { return Layout(static_cast<std::size_t>(size)).end; }

std::size_t Arena::nbytes_of_bells(int size) { return Layout(static_cast<std::size_t>(size)).lines; }

Arena::Arena(std::shared_ptr<std::byte> memory, int size)
    : memory_(std::move(memory)), size_(index(size)), ring_nbytes_(ring_nbytes(size)) {
  const Layout layout(size_);
  std::byte* const base = memory_.get();
  bells_ = reinterpret_cast<Bell*>(base + layout.bells);
  lines_ = reinterpret_cast<Line*>(base + layout.lines);
  steps_ = reinterpret_cast<Word*>(base + layout.steps);
  claimed_ = reinterpret_cast<Word*>(base + layout.claimed);
  finished_ = reinterpret_cast<Word*>(base + layout.finished);
  released_ = reinterpret_cast<Word*>(base + layout.released);
  last_words_ = reinterpret_cast<char*>(base + layout.last_words);
  rings_ = base + layout.rings;
  blocks_ = base + layout.blocks;
  stages_ = base + layout.stages;
}

void Arena::wake(int rank) const {
  for (int peer = 0; peer < size(); ++peer) {
    Bell& bell = this->bell(peer);
    if (peer == rank || bell.n_asleep.load(std::memory_order_relaxed) == 0) continue;
    bell.rung.fetch_add(1, std::memory_order_release);
    futex_wake(bell.rung);
  }
}

}  // namespace samestep
