#include "gpu/gpu_memory.h"

#include <algorithm>

namespace samestep {

void* BufferPool::allocate(std::size_t nbytes) const {
  if (device_ == kPinned) return gpu_->allocate_pinned(nbytes);
  const OnDevice on(*gpu_, device_);
  return gpu_->allocate(nbytes);
}

void BufferPool::release(void* data) const noexcept {
  if (device_ == kPinned) {
    gpu_->free_pinned(data);
  } else {
    gpu_->free(data);
  }
}

std::shared_ptr<std::byte> BufferPool::take(std::size_t nbytes) {
  nbytes = std::max(nbytes, std::size_t{1});
  std::pair<void*, std::size_t> block{nullptr, nbytes};
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& kept) {
      return kept.second >= nbytes && kept.second <= 2 * nbytes + 4096;
    });
    if (found != free_.end()) {
      block = *found;
      cached_nbytes_ -= block.second;
      free_.erase(found);
    }
  }
  if (block.first == nullptr) block.first = allocate(nbytes);
  return {static_cast<std::byte*>(block.first), [self = shared_from_this(), block](std::byte*) {
            {
              const std::lock_guard lock(self->mutex_);
              if (self->device_ != kPinned || self->cached_nbytes_ + block.second <= kKept) {
                self->free_.push_back(block);
                self->cached_nbytes_ += block.second;
                return;
              }
            }
            self->release(block.first);
          }};
}

}  // namespace samestep
