#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "communicator/signature.h"

namespace samestep {

/// Numbers of the groups that are made from one group, for what knows groups by a number.
///
/// The members of a new group agree without messages: all of them count the groups that are made of the same ranks in
/// the same order. Groups that several threads make of different groups at the same time have different numbers.
/// Not thread-safe.
class GroupNumbers {
 public:
  static constexpr std::uint64_t kWorld = 1;
  static constexpr std::uint64_t kBeside = 2;  ///< stands for a world, too, in the numbers of the groups beside it

  explicit GroupNumbers(std::uint64_t own = kWorld) : own_(own) {}

  /// Of the group itself.
  std::uint64_t own() const { return own_; }
  /// Of the next group of `members`: a hash of 63 bits. Never that of a world.
  std::uint64_t next(std::span<const int> members) {
    std::uint64_t hash = mix(mix(0, own_), made_[{members.begin(), members.end()}]++);
    for (const int member : members) hash = mix(hash, static_cast<std::uint64_t>(member) + 1);
    return hash | (1ull << 63);
  }

 private:
  std::uint64_t own_;
  std::map<std::vector<int>, std::uint64_t> made_;  // groups by their members
};

}  // namespace samestep
