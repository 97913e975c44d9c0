#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "device/device_communicator.h"
#include "nccl/nccl_calls.h"

namespace samestep {

/// Operations of a group on lists of arrays, with one array on each of several devices of every rank.
///
/// Each list of devices that is used has its own NCCL clique, in which device j of rank k is member k * L + j, for L
/// devices on every rank. Ranks number their lists in the order of first use, and compare the numbers with each
/// operation: if a rank uses another list than the others, all throw MismatchError. Number 1 is each rank's own device,
/// if NCCL is available.
///
/// Ordering and failures are as in DeviceCommunicator.
class DeviceCliques : public std::enable_shared_from_this<DeviceCliques> {
 public:
  /// What ranks compare of a call.
  struct CliqueArgs {
    CollectiveType type;  ///< allreduce, reduce, bcast or allgather
    DType dtype = DType::uint8;
    Reduction reduction = {};
    int root = 0;
    std::size_t length = 0;  ///< arrays in the list
    std::size_t count = 0;   ///< elements in each
    int number = 0;          ///< of the list of devices; 0: staged through the host
    int detail = 0;          ///< root's array, or the number of pieces of a result
  };

  /// `own`: the group's communicator on one device of each rank; null without NCCL. Not closed here.
  static std::shared_ptr<DeviceCliques> make(std::shared_ptr<Communicator> host,
                                             std::shared_ptr<Communicator> signature_check, DeviceOptions options,
                                             std::shared_ptr<NcclComm> own);

  /// The clique of a list of devices, numbered from 1; 0 if the list is new.
  int clique_id(std::span<const int> devices) const;

  /// Compares a call between all ranks, on the host.
  Communicator::WorkPtr check_signature(const CliqueArgs& args);
  /// Assigns the next number and a clique to a list of distinct devices. Collective; blocks; throws as NcclComm::open.
  int add(std::vector<int> devices, const Deadline& deadline);

  // Buffer i is on device i of the list. All have the same dtype and count, on all ranks.
  Communicator::WorkPtr allreduce(int number, std::span<const InOut> buffers, const Reduction& reduction);
  /// Stores the result in `out` at array `root_array` of rank `root`; other ranks ignore `out`.
  Communicator::WorkPtr reduce(int number, std::span<const ConstBuffer> in, Buffer out, const Reduction& reduction,
                               int root, int root_array);
  Communicator::WorkPtr bcast(int number, std::span<const Buffer> buffers, int root, int root_array);
  /// `outs[i]`, on device i: one buffer for the whole result, or one for each member in order.
  Communicator::WorkPtr allgather(int number, std::span<const ConstBuffer> in,
                                  std::span<const std::vector<Buffer>> outs);

  std::uint64_t n_launched() const { return n_launched_; }
  std::uint64_t n_launched_bytes() const { return n_launched_bytes_; }
  void close(const Deadline& deadline);
  void abandon(const std::exception_ptr& error);
  /// As NcclComm::wait_for_device.
  void wait_for_device(const Deadline& deadline) const;
  /// Called when ranks differ in their use of NCCL: ends all cliques.
  void mismatch_error(const std::exception_ptr& error);

 private:
  DeviceCliques(std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check,
                DeviceOptions options, std::shared_ptr<NcclComm> own);

  struct Clique {
    std::vector<int> devices;
    std::shared_ptr<NcclComm> channel;
  };
  /// The device of one member, and its NCCL calls.
  struct Part {
    std::vector<StreamHandle> after;
    nccl_calls::Calls calls;
  };

  Clique clique(int number) const;
  /// Lets a mismatch in one communicator end the others.
  void watch_mismatches(NcclComm& channel);
  /// All communicators made here.
  std::vector<Clique> cliques() const;
  Communicator::WorkPtr launch(const Clique& clique, const CliqueArgs& args, std::vector<Part> parts,
                               std::size_t nbytes);
  /// Checks the buffer of list entry `i`.
  void check(const Clique& clique, const CliqueArgs& args, std::size_t i, const ConstBuffer& buffer,
             std::size_t times = 1) const;
  /// The number of devices of all ranks.
  int size_of(const Clique& clique) const;
  int member(const Clique& clique, int root, int root_array) const;

  std::shared_ptr<Communicator> host_, signature_check_;
  std::shared_ptr<NcclComm> own_;
  DeviceOptions options_;
  mutable std::mutex mutex_;
  std::vector<Clique> cliques_;
  std::atomic<std::uint64_t> n_launched_ = 0, n_launched_bytes_ = 0;
};

}  // namespace samestep
