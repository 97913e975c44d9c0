#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace samestep {

/// Blocks of temporary memory, 64-byte aligned, kept for the next operation.
///
/// Aligned by hand: before glibc 2.38 an aligned block that was freed is too short for the next one of its size, and
/// the heap of a process that makes one world after the other grows and grows.
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
    for (Block& kept : kept_) {
      if (kept.capacity >= nbytes) {
        Block block = std::move(kept);
        std::swap(kept, kept_.back());
        kept_.pop_back();
        return block;
      }
    }
    auto* const memory = new std::byte[nbytes + kAlignment];
    const std::size_t offset = kAlignment - reinterpret_cast<std::uintptr_t>(memory) % kAlignment;
    return {std::unique_ptr<std::byte[], Free>(memory + offset, Free{offset}), nbytes};
  }

  void give_back(Block block) {
    if (kept_.size() < kMostKept) kept_.push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kMostKept = 4;
  std::vector<Block> kept_;
};

}  // namespace samestep
