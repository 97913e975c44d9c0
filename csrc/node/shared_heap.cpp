#include "node/shared_heap.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace samestep {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSegment = std::size_t{64} << 20;

}  // namespace

/// Eight sizes for each doubling, whole pages: at most an eighth is wasted.
std::size_t SharedHeap::class_of(std::size_t nbytes) {
  nbytes = std::max(nbytes, kPage);
  const std::size_t grain = std::max(kPage, std::bit_floor(nbytes) / 8);
  return (nbytes + grain - 1) / grain * grain;
}

void* SharedHeap::cut(std::size_t nbytes) {
  auto segment = std::find_if(segments_.begin(), segments_.end(),
                              [nbytes](const Segment& s) { return s.memory.nbytes() - s.used >= nbytes; });
  if (segment == segments_.end()) {
    Segment made{SharedMemory::make("samestep-heap", std::max(kSegment, nbytes)), 0};
    announce_(static_cast<std::uint32_t>(segments_.size()), made.memory);
    made.memory.close_fd();
    segments_.push_back(std::move(made));
    segment = segments_.end() - 1;
  }
  std::byte* const block = segment->memory.data() + segment->used;
  segment->used += nbytes;
  populate(block, nbytes);
  return block;
}

void* SharedHeap::allocate(std::size_t nbytes) {
  const std::size_t size = class_of(nbytes);
  const std::lock_guard lock(mutex_);
  void* block = nullptr;
  if (auto& blocks = free_[size]; !blocks.empty()) {
    block = blocks.back();
    blocks.pop_back();
  } else {
    try {
      block = cut(size);
    } catch (const UnavailableError&) {
      return nullptr;
    }
  }
  in_use_.emplace(block, size);
  return block;
}

void SharedHeap::free(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(data);
  if (found == in_use_.end()) return;
  free_[found->second].push_back(data);
  in_use_.erase(found);
}

std::optional<SharedHeap::Spot> SharedHeap::find(const void* data, std::size_t nbytes) const {
  const std::lock_guard lock(mutex_);
  const auto* bytes = static_cast<const std::byte*>(data);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const SharedMemory& memory = segments_[i].memory;
    if (bytes < memory.data() || bytes + nbytes > memory.data() + memory.nbytes()) continue;
    return Spot{static_cast<std::uint32_t>(i), static_cast<std::uint64_t>(bytes - memory.data())};
  }
  return std::nullopt;
}

}  // namespace samestep
