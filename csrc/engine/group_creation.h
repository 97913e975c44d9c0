#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/operation.h"

namespace samestep {

/// What the members of a new group tell each other, without the other ranks of the parent group: done once all members
/// have called with the same list. Before they make the group it agrees on a number, and after that on whether all
/// have made it.
class GroupCreation : public Operation {
 public:
  /// `failure`: why this rank cannot make the group; empty if it can.
  GroupCreation(std::shared_ptr<ProgressEngine> engine, std::vector<int> ranks, std::string_view failure = {});

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override;
  std::vector<int> pending_peers_of_operation() override;

  /// Once it is done: the number of the group; see Transport::reserve_group_id.
  std::uint32_t group_id() const;
  /// The first rank that cannot make the group, and why, such as "rank 1: no memory is left". Empty if all can.
  std::string failure() const;

 protected:
  void abort() override;
  std::string what() const override;

 private:
  struct Announcement {
    std::uint64_t digest;  // of the list of ranks
    std::uint32_t number;  // which the sender has reserved
    std::array<char, 372> failure;
  };

  std::vector<int> ranks_;
  Announcement own_{};
  std::vector<Announcement> received_;  // by member
  std::vector<RequestSet> receives_;
  RequestSet sends_;
};

}  // namespace samestep
