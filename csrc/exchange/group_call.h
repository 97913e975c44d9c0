#pragma once

#include <cstdint>
#include <vector>

#include "exchange/operation.h"

namespace samestep {

/// The members of a group that is to be made find each other, without the rest of the parent group:
/// done once all have called with the same list.
class GroupCall : public Operation {
 public:
  GroupCall(std::shared_ptr<Engine> engine, std::vector<int> ranks);

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override;
  std::string describe() const override;
  std::vector<int> waits_for() override;

 protected:
  void give_up() override;

 private:
  std::vector<int> ranks_;
  std::uint64_t digest_ = 0;
  std::vector<std::uint64_t> digests_;  // of the members' lists
  std::vector<Requests> receives_;
  Requests sends_;
};

}  // namespace samestep
