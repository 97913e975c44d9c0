#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// Finds calls that ranks make in other orders on the paths of a group, each of which compares its own calls alone. A
/// rank that waits on one path and a rank that waits on another would not notice each other.
///
/// A rank that has waited for a while tells the others how many collectives it has called on each path, and once it
/// has heard all of them they start anew. All see the same numbers. Where of two ranks each has called what the other
/// has not, their calls are in different orders, whatever they do next: no call of a correct program is taken for that.
///
/// Not thread-safe.
class MixedCalls {
 public:
  enum Path : std::uint8_t { host, staged, nccl, close };
  static constexpr std::size_t kPaths = 4;
  using Counts = std::array<std::uint64_t, kPaths>;    ///< by path
  static constexpr std::uint64_t kEnded = UINT64_MAX;  ///< in the place of a count: of a path that has failed

  struct Found {
    Counts most{};     ///< on each path the most that a rank has called
    std::string text;  ///< what this rank has called
  };

  /// `group`: of the same ranks; nobody else sends messages in it with `kTag`.
  explicit MixedCalls(std::shared_ptr<Communicator> group);
  ~MixedCalls();
  MixedCalls(const MixedCalls&) = delete;
  MixedCalls& operator=(const MixedCalls&) = delete;

  /// To be called about every millisecond of waiting. `now`: what this rank has called. Blocks only once
  /// it has found some, until all ranks have.
  std::optional<Found> look(const Counts& now);

 private:
  static constexpr int kTag = 1;

  void start_exchange(const Counts& mine);
  bool has_ended() const;
  Found found() const;

  std::shared_ptr<Communicator> group_;
  std::vector<Counts> of_ranks_;                 // as exchanged
  std::vector<Communicator::WorkPtr> exchange_;  // empty between exchanges
  Counts seen_{}, equal_{};                      // the last that `look` got; the last that all ranks had
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();  // when `seen_` was new
};

}  // namespace samestep
