#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/departure.h"

namespace samestep {

class ProgressEngine;

/// The world and all groups made from it, on one rank. If the loss of a rank ends one of them, all end: this rank may
/// never call another group again, in which peers wait for it.
class Family {
 public:
  void add(const std::shared_ptr<ProgressEngine>& engine);
  /// Ends all groups with `error` and reports `why` to their ranks. The caller must hold the mutex of none of them.
  void leave(const std::exception_ptr& error, const Departure& why);

  /// The blocks of `together()` that this rank is in, by a number that all ranks of their group share.
  void open_block(std::uint64_t block);
  void close_block(std::uint64_t block);
  bool is_open(std::uint64_t block);
  /// relaxed: a thread sees at least the blocks that it has opened itself.
  bool has_open_blocks() const { return n_open_blocks_.load(std::memory_order_relaxed) != 0; }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<ProgressEngine>> engines_;
  std::vector<std::uint64_t> blocks_;
  std::atomic<std::size_t> n_open_blocks_ = 0;
};

}  // namespace samestep
