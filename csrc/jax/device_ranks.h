#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "core/deadline.h"
#include "jax/ranks_capsule.h"

namespace samestep {

/// What JAX takes for a communicator of MPI: a group, or why there is none.
struct DeviceGroup {
  std::shared_ptr<Communicator> communicator;
  std::string problem = "";  ///< for every call of this group, where `communicator` is null

  /// Throws UnavailableError where there is no group.
  Communicator& get() const;
};

/// One operation that JAX waits for later.
struct DeviceRequest {
  std::shared_ptr<Communicator> communicator;
  Communicator::WorkPtr work;
};

/// The ranks of this process in the world of all devices of a JAX program: one for each local device. Thread-safe.
class DeviceRanks {
 public:
  DeviceRanks(const RanksCapsule& ranks, Seconds timeout);

  int rank() const { return worlds_.front()->rank(); }
  int size() const { return worlds_.front()->size(); }

  /// The group of devices whose first one is `color` and in which the calling device has rank `key`. Collective over
  /// all devices of the program, as in MPI.
  ///
  /// XLA makes a communicator for each device by a call of its own, from any thread, and does not say for which device.
  /// So each call uses the rank that has made the fewest groups: all devices of a program make their groups in the same
  /// order, and which of a process's ranks stands for which device in one group is of no importance.
  std::shared_ptr<Communicator> split(int color, int key);

  /// Leaves the world and all groups because of a program of this process: the others learn why.
  void leave_world(const std::string& reason);

  /// Runs a collective to its end.
  void run(Communicator& group, const CollectiveArgs& args) { wait(group, (group.*functions_.run)(args)); }
  Communicator::WorkPtr send(Communicator& group, const SendArgs& args) { return (group.*functions_.send)(args); }
  Communicator::WorkPtr recv(Communicator& group, const RecvArgs& args) { return (group.*functions_.recv)(args); }

  /// Waits until a call has ended. A timeout ends the group, for JAX frees the arrays.
  void wait(Communicator& group, const Communicator::WorkPtr& work);

  /// Leaves the world and all groups, when the program ends. Peers that go on have some seconds to end too, and what
  /// this process still has pending is waited for; then they learn that it has left.
  void close();

 private:
  void meet_at_end();
  std::size_t take_rank();

  RanksCapsule functions_;
  std::vector<std::shared_ptr<Communicator>> worlds_;
  Seconds timeout_;
  std::mutex mutex_;
  std::vector<std::uint64_t> splits_;  // by local rank: groups made
  std::vector<bool> busy_;
  std::vector<std::weak_ptr<Communicator>> groups_;
  // `meet_at_end` loads the second before the first, in the default order: if they are equal, no wait was pending.
  std::atomic<std::uint64_t> waits_started_{0}, waits_ended_{0};
};

}  // namespace samestep
