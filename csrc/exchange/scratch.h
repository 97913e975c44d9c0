#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace samestep {

/// Blocks of temporary memory, 64-byte aligned, kept for the next operation.
class Scratch {
  struct Free {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };

 public:
  struct Block {
    std::unique_ptr<std::byte[], Free> data;
    std::size_t capacity = 0;
  };

  /// A block of at least `nbytes`.
  Block take(std::size_t nbytes) {
    for (Block& kept : kept_) {
      if (kept.capacity >= nbytes) {
        Block block = std::move(kept);
        std::swap(kept, kept_.back());
        kept_.pop_back();
        return block;
      }
    }
    return {std::unique_ptr<std::byte[], Free>(new (std::align_val_t{64}) std::byte[nbytes]), nbytes};
  }

  void give_back(Block block) {
    if (kept_.size() < kMostKept) kept_.push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kMostKept = 4;
  std::vector<Block> kept_;
};

}  // namespace samestep
