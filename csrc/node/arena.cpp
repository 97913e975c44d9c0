#include "node/arena.h"

#include <algorithm>
#include <bit>

namespace samestep {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

/// Where the parts of an arena begin.
struct Layout {
  std::size_t lines, steps, claimed, finished, released, last_words, rings, blocks, stages, end;

  explicit Layout(std::size_t size) {
    std::size_t at = 0;
    const auto take = [&at](std::size_t nbytes) {
      const std::size_t begin = at;
      at = whole_pages(at + nbytes);
      return begin;
    };
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

Arena::Arena(std::shared_ptr<std::byte> memory, int size)
    : memory_(std::move(memory)), size_(index(size)), ring_nbytes_(ring_nbytes(size)) {
  const Layout layout(size_);
  std::byte* const base = memory_.get();
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

}  // namespace samestep
