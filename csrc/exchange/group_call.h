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

  /// Once it is done: the number of the group, see Messenger::next_group.
  std::uint32_t number() const;

 protected:
  void give_up() override;

 private:
  struct Word {
    std::uint64_t digest;  // of the list of ranks
    std::uint32_t number;  // that the sender could give to the group
  };

  std::vector<int> ranks_;
  Word word_{};
  std::vector<Word> words_;  // by member
  std::vector<Requests> receives_;
  Requests sends_;
};

}  // namespace samestep
