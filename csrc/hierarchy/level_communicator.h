#pragma once

#include <memory>
#include <vector>

#include "exchange/exchange_communicator.h"
#include "hierarchy/level_group.h"

namespace samestep {

/// The ranks of several hosts, at two levels. Operations begin, agree and fail as over the messenger alone; long
/// collectives read and write the memory of the ranks of their host and send each byte between hosts once (LevelWork).
/// Groups whose ranks share a host have no second level and are made by node/.
///
/// Sums are in pairwise order of rank where each host has the same power of two of consecutive ranks, else by host and
/// then by rank.
class LevelCommunicator final : public ExchangeCommunicator {
 public:
  /// `seats`: by rank. `host`: of this rank; null if it is alone on it. Collective over the ranks of each host.
  static std::shared_ptr<LevelCommunicator> open(std::unique_ptr<Messenger> messenger, std::vector<Seat> seats,
                                                 std::shared_ptr<Host> host, ExchangeOptions options,
                                                 const Deadline& deadline);
  /// The same on what operations over the messenger alone have in common already.
  static std::shared_ptr<LevelCommunicator> over(std::shared_ptr<Engine> engine, std::vector<Seat> seats,
                                                 std::shared_ptr<Host> host, const Deadline& deadline);

  LevelCommunicator(std::shared_ptr<Engine> engine, std::shared_ptr<LevelGroup> group)
      : ExchangeCommunicator(std::move(engine)), group_(std::move(group)) {}

  std::string_view engine() const override { return "hier"; }
  WorkPtr all_gather(ConstBuffer in, Buffer out, const Shape& shape) override;
  std::shared_ptr<std::byte> allocate_shared(std::size_t nbytes) override;
  std::shared_ptr<SharedHeap> heap() const override;

 protected:
  WorkPtr reduction(const Signature& signature, ConstBuffer in, Buffer out, const Reduction& reduction,
                    std::size_t nbytes) override;
  WorkPtr long_broadcast(const Signature& signature, Buffer buffer) override;
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                           const Deadline& deadline) override;

 private:
  std::shared_ptr<LevelGroup> group_;
};

/// The same ranks at two levels. `hosts`: by rank, the number of its host. `host`: as LevelCommunicator::open.
/// Both are one group from then on: closing one closes the other. No messages are sent.
///
/// Throws InvalidArgumentError if `flat` has no messenger. Collective.
std::shared_ptr<Communicator> open_levels(Communicator& flat, const std::vector<int>& hosts, std::shared_ptr<Host> host,
                                          const Deadline& deadline);

}  // namespace samestep
