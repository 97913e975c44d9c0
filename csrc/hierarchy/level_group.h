#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hierarchy/seats.h"
#include "node/host.h"

namespace samestep {

/// What the operations of one group over several hosts have in common.
struct LevelGroup {
  LevelGroup(Seats all_seats, int rank_of_group) : seats(std::move(all_seats)), rank(rank_of_group) {}

  Seats seats;
  int rank;
  std::shared_ptr<Host> host;           ///< null where this rank is alone on its host
  std::shared_ptr<std::byte> marks;     ///< shared by the ranks of the group on this host, see Marks
  std::vector<std::byte> bounce = {};   ///< what is pulled from other ranks lies here for a moment
  std::vector<std::byte> partial = {};  ///< as does a step's sum over the ranks of this host

  int my_host() const { return seats.host_of(rank); }
  std::span<const int> neighbours() const { return seats.ranks_on(my_host()); }
};

/// Who of a host has left the group: their memory must not be touched any more. One writer for each word.
class Marks {
 public:
  static std::size_t nbytes_for(std::size_t n_ranks) { return n_ranks * sizeof(Word); }

  /// `memory`: zero before the first rank came; null for a rank that is alone. `place`: of this rank on its host.
  Marks(std::shared_ptr<std::byte> memory, std::size_t n_ranks, std::size_t place)
      : memory_(std::move(memory)), words_(reinterpret_cast<Word*>(memory_.get())), size_(n_ranks), place_(place) {}

  /// This rank takes no part in operations from `first_missing` on.
  void leave(std::uint64_t first_missing) {
    if (words_ == nullptr) return;
    const std::uint64_t before = words_[place_].left.load(std::memory_order_relaxed);
    if (before != 0 && before <= first_missing + 1) return;
    words_[place_].left.store(first_missing + 1, std::memory_order_release);
  }
  bool all_here(std::uint64_t sequence) const {
    for (std::size_t i = 0; words_ != nullptr && i < size_; ++i) {
      const std::uint64_t left = words_[i].left.load(std::memory_order_acquire);
      if (left != 0 && sequence + 1 >= left) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Word {
    std::atomic<std::uint64_t> left;  // the first operation without the rank, plus one; 0 while it is here
  };

  std::shared_ptr<std::byte> memory_;
  Word* words_;
  std::size_t size_, place_;
};

}  // namespace samestep
