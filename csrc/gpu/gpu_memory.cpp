#include "gpu/gpu_memory.h"

#include <algorithm>
#include <bit>

#include "process/wait_hooks.h"

namespace samestep {

BufferPool::~BufferPool() {
  // To free waits for the device, which may wait for another thread of Python.
  wait_hooks().run_without_gil([this] {
    for (const Block& block : free_) release(block);
  });
}

BufferPool::Block BufferPool::allocate(std::size_t nbytes) const {
  const OnDevice on(*gpu_, device_);
  if (!is_pinned_) return {gpu_->allocate(nbytes), nbytes};
  if (source_) {
    // If the runtime cannot pin shared memory, ordinary pinned memory serves; other ranks then copy once more.
    if (std::shared_ptr<std::byte> data = source_(nbytes); data != nullptr && gpu_->pin(data.get(), nbytes)) {
      return {data.get(), nbytes, data};
    }
  }
  return {gpu_->allocate_pinned(nbytes), nbytes};
}

void BufferPool::release(const Block& block) const noexcept {
  if (!is_pinned_) {
    gpu_->free(block.data, device_);
  } else if (block.from_source != nullptr) {
    gpu_->unpin(block.data, device_);
  } else {
    gpu_->free_pinned(block.data, device_);
  }
}

std::shared_ptr<std::byte> BufferPool::take(std::size_t nbytes) {
  nbytes = std::max(nbytes, std::size_t{1});
  // Few lengths: else every array that is a little longer than those before would add a block for good, and to free the
  // others would wait for the device, which may wait for peers.
  if (!is_pinned_) nbytes = std::bit_ceil(nbytes);
  Block block;
  {
    const std::lock_guard lock(mutex_);
    // A block may be about twice as long as needed, not more: short operations must not occupy the memory of long ones.
    const auto fits = [nbytes](const Block& kept) { return kept.nbytes >= nbytes && kept.nbytes <= 2 * nbytes + 4096; };
    auto found = free_.end();  // the smallest that fits: larger ones are for larger requests
    for (auto kept = free_.begin(); kept != free_.end(); ++kept) {
      if (fits(*kept) && (found == free_.end() || kept->nbytes < found->nbytes)) found = kept;
    }
    if (found != free_.end()) {
      block = std::move(*found);
      if (is_pinned_) cached_nbytes_ -= block.nbytes;
      free_.erase(found);
    }
  }
  // Without the mutex: pinning takes as long as copying, and other threads return blocks meanwhile.
  if (block.data == nullptr) block = allocate(nbytes);
  {
    const std::lock_guard lock(mutex_);
    used_nbytes_ += block.nbytes;
    most_cached_nbytes_ = std::max(most_cached_nbytes_, 2 * used_nbytes_);
  }
  auto* const data = static_cast<std::byte*>(block.data);
  // The deleter owns the pool: a block may be in use when the group that made the pool has ended.
  return {data, [self = shared_from_this(), block = std::move(block)](std::byte*) { self->recycle(block); }};
}

void BufferPool::recycle(const Block& block) {
  std::vector<Block> evicted;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
    used_nbytes_ -= block.nbytes;
    if (!is_pinned_) return;
    cached_nbytes_ += block.nbytes;
    // Those that have not been used for longest: of lengths that no longer occur the cache would stay full.
    auto kept = free_.begin();
    for (; cached_nbytes_ > most_cached_nbytes_; ++kept) cached_nbytes_ -= kept->nbytes;
    evicted.assign(free_.begin(), kept);
    free_.erase(free_.begin(), kept);
  }
  for (const Block& unused : evicted) release(unused);
}

}  // namespace samestep
