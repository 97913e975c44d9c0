#pragma once

#include <cstdint>
#include <vector>

#include "engine/operation.h"

namespace samestep {

/// The creation of a group by its members, without the other ranks of the parent group: done once all members have
/// called with the same list.
class GroupCreation : public Operation {
 public:
  GroupCreation(std::shared_ptr<ProgressEngine> engine, std::vector<int> ranks);

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override;
  std::vector<int> pending_peers_of_operation() override;

  /// Once it is done: the number of the group; see Transport::reserve_group_id.
  std::uint32_t group_id() const;

 protected:
  void abort() override;
  std::string what() const override;

 private:
  struct Announcement {
    std::uint64_t digest;  // of the list of ranks
    std::uint32_t number;  // which the sender has reserved
  };

  std::vector<int> ranks_;
  Announcement own_{};
  std::vector<Announcement> received_;  // by member
  std::vector<RequestSet> receives_;
  RequestSet sends_;
};

}  // namespace samestep
