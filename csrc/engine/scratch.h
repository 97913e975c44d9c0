#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace samestep {

/// Blocks of temporary memory, 64-byte aligned, which are kept for the next operation.
///
/// Aligned by hand: before glibc 2.38 a freed aligned block is too short for the next aligned block of the same size,
/// so the heap of a process that opens and closes many groups keeps growing.
class Scratch {
  static constexpr std::size_t kAlignment = 64;

  struct Free {
    std::size_t offset;  // of the block in what was allocated
    void operator()(std::byte* data) const { delete[] (data - offset); }
  };

 public:
  struct Block {
    std::unique_ptr<std::byte[], Free> data;
    std::size_t capacity = 0;
  };

  /// A block of at least `nbytes`.
  Block take(std::size_t nbytes) {
    for (Block& free_block : blocks_) {
      if (free_block.capacity >= nbytes) {
        Block block = std::move(free_block);
        std::swap(free_block, blocks_.back());
        blocks_.pop_back();
        return block;
      }
    }
    auto* const memory = new std::byte[nbytes + kAlignment];
    const std::size_t offset = kAlignment - reinterpret_cast<std::uintptr_t>(memory) % kAlignment;
    return {std::unique_ptr<std::byte[], Free>(memory + offset, Free{offset}), nbytes};
  }

  void release(Block block) {
    if (blocks_.size() < kMaxBlocks) blocks_.push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kMaxBlocks = 4;
  std::vector<Block> blocks_;
};

}  // namespace samestep
