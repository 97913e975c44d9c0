#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "communicator/communicator.h"
#include "nccl/compared_launches.h"
#include "nccl/device_packing.h"
#include "nccl/nccl_channel.h"
#include "nccl/staging.h"

namespace samestep {

class DeviceCliques;

/// How a group treats device memory.
struct DeviceOptions {
  std::shared_ptr<GpuLibrary> gpu;
  int device = 0;                            ///< of this rank; its buffers are there
  std::shared_ptr<NcclLibrary> nccl;         ///< null: everything goes through the host
  Seconds timeout{600};                      ///< for operations that nobody waits for on the host
  bool compare_first = false;                ///< ranks compare each operation before it begins, rather than beside it
  std::size_t piece = 4 << 20;               ///< bytes of a long buffer that are staged at a time
  bool gpu_aware = false;                    ///< the host group hands long messages of device memory to MPI itself
  std::shared_ptr<Packer> packer = nullptr;  ///< null: many small buffers are moved where they lie
  std::size_t pack_below = 512 << 10;        ///< bytes; from here on a buffer is not packed
};

/// A group whose ranks have a GPU each: device memory goes through NCCL, or through pinned host memory and `host`
/// where NCCL has no such operation or there is no NCCL; host memory goes to `host` as it is.
///
/// All ranks call a verb with device memory, or all with host memory; point to point each as it likes. Messages of
/// device memory go through the host, so that tags, any source and any order of calls mean what they always do.
///
/// Works on device memory are ordered with streams (`Work::order_before`); verbs do not wait. Ranks that do not agree
/// are found out on the host, beside the operation: MismatchError on all of them, and device memory cannot be used in
/// this group any more, unless `compare_first`.
///
/// Collective over `host`, of which it makes two more groups.
class DeviceCommunicator final : public Communicator {
 public:
  static std::shared_ptr<DeviceCommunicator> open(std::shared_ptr<Communicator> host, DeviceOptions options,
                                                  const Deadline& deadline);
  ~DeviceCommunicator() override;

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }
  std::string_view engine() const override { return host_->engine(); }
  const std::shared_ptr<Communicator>& host() const { return host_; }
  const DeviceOptions& options() const { return options_; }

  WorkPtr all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) override;
  WorkPtr reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root, const Shape& shape) override;
  WorkPtr broadcast(Buffer buffer, int root, const Shape& shape) override;
  WorkPtr all_gather(ConstBuffer in, Buffer out, const Shape& shape) override;
  WorkPtr all_gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts) override;
  WorkPtr gather(ConstBuffer in, Buffer out, int root, const Shape& shape) override;
  WorkPtr gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts, int root) override;
  WorkPtr scatter(ConstBuffer in, Buffer out, int root, const Shape& shape) override;
  WorkPtr scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out, int root) override;
  WorkPtr reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) override;
  WorkPtr all_to_all(ConstBuffer in, Buffer out, const Shape& shape) override;
  WorkPtr all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts, Buffer out,
                       std::span<const std::uint64_t> receive_counts) override;
  WorkPtr barrier() override { return host_->barrier(); }
  WorkPtr now(const Call& call) override;
  WorkPtr send(ConstBuffer in, int dest, int tag) override;
  WorkPtr recv(Buffer out, int source, int tag) override;
  WorkPtr send_now(const ConstBuffer& in, int dest, int tag) override;
  WorkPtr recv_now(const Buffer& out, int source, int tag, Status& status) override;
  bool cancel(Work& recv) override { return stager_->cancel(recv) || host_->cancel(recv); }

  /// Each output = the reduction of its input over all ranks, as one operation. All of one dtype.
  WorkPtr all_reduce_many(std::span<const InOut> buffers, const Reduction& reduction);
  /// Each buffer = root's, as one operation.
  WorkPtr broadcast_many(std::span<const Buffer> buffers, int root);

  /// Operations on lists of arrays on several devices of each rank.
  DeviceCliques& cliques() { return *cliques_; }

  /// Packs buffers of fewer bytes; before the first of the two operations above.
  void pack_below(std::size_t nbytes) { packing_->ask_for(nbytes); }

  std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline) override;
  std::shared_ptr<std::byte> allocate_shared(std::size_t nbytes) override { return host_->allocate_shared(nbytes); }
  bool reaches_memory() const override { return host_->reaches_memory(); }
  std::uint64_t place_of(const void* data, std::size_t nbytes) const override { return host_->place_of(data, nbytes); }
  bool is_shared(const void* data, std::size_t nbytes) const override { return host_->is_shared(data, nbytes); }
  bool pull(int peer, std::span<const Piece> pieces, bool taken) override { return host_->pull(peer, pieces, taken); }
  bool push(int peer, std::span<const Piece> pieces) override { return host_->push(peer, pieces); }
  void progress() override;
  void look_for_losses() override { host_->look_for_losses(); }
  void close(const Deadline& deadline) override;
  void abandon(std::exception_ptr error, const std::string& reason) override;
  bool usable() const override { return host_->usable(); }
  void set_oversubscribed(bool oversubscribed) override;
  bool oversubscribed() const override { return host_->oversubscribed(); }
  Counters counters() const override;

 private:
  DeviceCommunicator(std::shared_ptr<Communicator> host, DeviceOptions options)
      : host_(std::move(host)), options_(std::move(options)) {}

  void check_here(std::string_view verb, ConstBuffer& buffer) const;
  void check_here(std::string_view verb, Buffer& buffer) const;
  /// Starts an operation of NCCL once its agreement, made by the host group, has started, or once ranks agree.
  WorkPtr on_device(NcclLaunch launch, std::size_t nbytes);
  WorkPtr staged_pieces(ConstBuffer in, Buffer out, const Shape& shape,
                        std::function<WorkPtr(ConstBuffer, Buffer, const Shape&)> start, bool only_moves = false);
  WorkPtr staged_whole(ConstBuffer in, Buffer out, std::function<WorkPtr(ConstBuffer, Buffer)> start,
                       bool message = false);
  /// A collective that only moves data, in runs of so many elements: by address where MPI gets all of them, else
  /// staged. Which of the two is this rank's own affair.
  WorkPtr moved(ConstBuffer in, Buffer out, std::span<const std::uint64_t> runs,
                std::function<WorkPtr(ConstBuffer, Buffer)> start);
  WorkPtr started_by_address(std::vector<StreamHandle> after, std::function<WorkPtr()> start);
  /// Lets what a rank has for itself be copied on the device.
  void reach_memory_by_address();
  /// Whether a message of so many bytes goes to MPI as it lies.
  bool by_address(std::size_t nbytes) const;
  /// Whether a run of a collective does.
  bool run_by_address(std::size_t nbytes) const;
  WorkPtr message_by_address(const ConstBuffer& buffer, bool sends, std::function<WorkPtr()> start);
  WorkPtr routed(std::string what, ConstBuffer in, std::vector<std::uint64_t> sent, Buffer out,
                 std::vector<std::uint64_t> received, WorkPtr agreement);
  /// The calls of an operation on buffers of these sizes: `packed` if some are to be packed, else `apart`. To be asked
  /// before the operation's own agreement: the first time ranks agree on packing, and find out here if one does
  /// something else.
  NcclLaunch packed_or_apart(std::span<const std::size_t> nbytes,
                             const std::function<std::vector<nccl_calls::Calls>(nccl_calls::Packing)>& packed,
                             const std::function<nccl_calls::Calls()>& apart);
  std::shared_ptr<Communicator> wrap(std::shared_ptr<Communicator> child, const Deadline& deadline) const;

  std::shared_ptr<Communicator> host_;
  DeviceOptions options_;
  std::shared_ptr<Communicator> through_host_;  // the same ranks, for collectives that are staged or go by address
  std::shared_ptr<Communicator> agreement_;     // the same ranks, for what goes beside NCCL
  std::shared_ptr<Stager> stager_;
  std::unique_ptr<DevicePacking> packing_;
  std::shared_ptr<NcclChannel> channel_;        // null without NCCL
  std::shared_ptr<ComparedLaunches> compared_;  // if ranks compare first
  std::shared_ptr<DeviceCliques> cliques_;
  std::atomic<std::uint64_t> n_launched_ = 0, n_launched_bytes_ = 0;  // with NCCL
};

}  // namespace samestep
