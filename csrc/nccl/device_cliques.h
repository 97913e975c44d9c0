#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "nccl/device_communicator.h"
#include "nccl/nccl_calls.h"

namespace samestep {

/// Operations of a group on lists of arrays, one on each of several devices of every rank.
///
/// Each list of devices that comes to be used has a clique of NCCL of its own, in which device j of rank k is member
/// k * L + j, for L devices on every rank. Ranks number their lists of devices in the order of first use, and compare
/// the numbers with each operation: where one uses another list than the others, all throw MismatchError. Number 1 is
/// each rank's own device, if NCCL is there.
///
/// Works and failures are those of DeviceCommunicator.
class DeviceCliques : public std::enable_shared_from_this<DeviceCliques> {
 public:
  /// What ranks compare besides verb, dtype, operator and root.
  struct Call {
    Verb verb;  ///< all_reduce, reduce, broadcast or all_gather
    DType dtype = DType::uint8;
    Reduction reduction = {};
    int root = 0;
    std::size_t length = 0;  ///< arrays in the list
    std::size_t count = 0;   ///< elements in each
    int number = 0;          ///< of the list of devices; 0: through the host
    int detail = 0;          ///< the root's array, or in how many pieces results are received
  };

  /// `own`: of the group, on one device of each rank; null without NCCL. It is not closed here. `compared`: of the
  /// group, if ranks compare first.
  static std::shared_ptr<DeviceCliques> make(std::shared_ptr<Communicator> host,
                                             std::shared_ptr<Communicator> agreement, DeviceOptions options,
                                             std::shared_ptr<NcclChannel> own,
                                             std::shared_ptr<ComparedLaunches> compared);

  /// The number of a list of devices, from 1, or 0 where it is new.
  int number_of(std::span<const int> devices) const;

  /// Compares a call over all ranks, on the host.
  Communicator::WorkPtr agree(const Call& call);
  /// Gives a list of distinct devices the next number, and a clique. Collective, blocks; throws as NcclChannel::open.
  int add(std::vector<int> devices, const Deadline& deadline);

  // Buffer i is on device i of the list. All of one dtype and count, on all ranks.
  Communicator::WorkPtr all_reduce(int number, std::span<const InOut> buffers, const Reduction& reduction);
  /// Into `out` at array `root_array` of rank `root`; elsewhere `out` is ignored.
  Communicator::WorkPtr reduce(int number, std::span<const ConstBuffer> in, Buffer out, const Reduction& reduction,
                               int root, int root_array);
  Communicator::WorkPtr broadcast(int number, std::span<const Buffer> buffers, int root, int root_array);
  /// `outs[i]`, on device i: one buffer for all, or one for each member, in order of member.
  Communicator::WorkPtr all_gather(int number, std::span<const ConstBuffer> in,
                                   std::span<const std::vector<Buffer>> outs);

  std::uint64_t n_launched() const { return n_launched_; }
  std::uint64_t n_launched_bytes() const { return n_launched_bytes_; }
  void close(const Deadline& deadline);
  void abandon(const std::exception_ptr& error);
  /// Ranks differ in what they do with NCCL, so that none of them can use it any more, in whichever clique. Nothing
  /// happens where they compare first.
  void ranks_differ(const std::exception_ptr& error);

 private:
  DeviceCliques(std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> agreement, DeviceOptions options,
                std::shared_ptr<NcclChannel> own, std::shared_ptr<ComparedLaunches> compared);

  struct Clique {
    std::vector<int> devices;
    std::shared_ptr<NcclChannel> channel;
  };
  /// Where the buffers of one member are, and what is called with them.
  struct Part {
    std::vector<StreamHandle> after;
    nccl_calls::Calls calls;
  };

  Clique clique(int number) const;
  /// Failures of one channel that are ranks that differ end the others.
  void watch_for_differences(NcclChannel& channel);
  /// All that have been made here.
  std::vector<Clique> cliques() const;
  Communicator::WorkPtr launch(const Clique& clique, const Call& call, std::vector<Part> parts, std::size_t nbytes);
  /// Checks a buffer of list entry `i`.
  void check(const Clique& clique, const Call& call, std::size_t i, const ConstBuffer& buffer,
             std::size_t times = 1) const;
  int member(const Clique& clique, int root, int root_array) const;

  std::shared_ptr<Communicator> host_, agreement_;
  std::shared_ptr<NcclChannel> own_;
  std::shared_ptr<ComparedLaunches> compared_;
  DeviceOptions options_;
  mutable std::mutex mutex_;
  std::vector<Clique> cliques_;
  std::atomic<std::uint64_t> n_launched_ = 0, n_launched_bytes_ = 0;
};

}  // namespace samestep
