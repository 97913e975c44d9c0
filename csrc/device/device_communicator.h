#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "communicator/communicator.h"
#include "device/mixed_calls.h"
#include "gpu/capture.h"
#include "nccl/nccl_comm.h"
#include "process/owner_process.h"
#include "process/progress_source.h"

namespace samestep {

/// How a group treats device memory.
struct DeviceOptions {
  std::shared_ptr<GpuLibrary> gpu;
  int device = 0;                       ///< of this rank; its buffers are there
  std::shared_ptr<NcclLibrary> nccl;    ///< null: all operations are staged through the host
  Seconds timeout{600};                 ///< for operations that nobody waits for on the host
  std::size_t staging_bytes = 4 << 20;  ///< most bytes of a long buffer that are staged at a time
  bool gpu_aware = false;               ///< the host group hands long messages of device memory to MPI itself
  bool some_are_gpu_aware = false;      ///< on this or another rank; set by `open`
};

enum class NcclStart : std::uint8_t { now, at_first_use };

/// A group whose ranks have a GPU each: device memory is passed to NCCL, or staged in pinned host memory for `host`
/// where NCCL has no such operation or there is no NCCL; host memory is passed to `host` as it is.
///
/// All ranks call a verb with device memory, or all with host memory: see MixedCalls. Point to point each as it likes:
/// messages of device memory go through the host, so that tags, any source and any order of calls mean what they always
/// do.
///
/// Works on device memory are ordered with streams (`Work::make_stream_wait`); verbs do not wait. Signatures are
/// compared on the host while the operation runs: ranks that do not agree all get a MismatchError, and device memory
/// cannot be used in this group any more.
///
/// Collective over `host`, of which it makes two more groups. Groups made of it start NCCL with their first operation
/// on device memory, because each start takes time and memory of the device.
class DeviceCommunicator final : public Communicator, private Membership, public ProgressSource {
 public:
  static std::shared_ptr<DeviceCommunicator> open(std::shared_ptr<Communicator> host, DeviceOptions options,
                                                  const Deadline& deadline, NcclStart start = NcclStart::now);
  ~DeviceCommunicator() override;

  const std::shared_ptr<Communicator>& host() const { return host_; }
  const DeviceOptions& options() const { return options_; }

  /// An allreduce or bcast of each of `buffers`, as one operation. Those of an allreduce are of one dtype; those of a
  /// bcast are `out`.
  WorkPtr start_many(CollectiveArgs args, std::vector<InOut> buffers);

  /// Throws what an operation on each of these arrays of this rank would throw before it begins. For callers that let
  /// ranks exchange something first: a rank that is refused only then leaves the others behind in the operation.
  /// `verbs`: at the beginning of the texts, one for each array.
  void check_arrays(std::span<const std::string> verbs, std::span<const ConstBuffer> buffers) const;
  /// Lets the others, who have begun or will begin this collective on device memory, learn that this rank does not: see
  /// `refusal`. Throws only what ends its wait.
  void tell_refusal(const CollectiveArgs& args, std::string_view verb, std::string_view why);

  std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline, const std::string& called) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline,
                                      const std::string& called) override;
  PeerMemory* peer_memory() override { return host_->peer_memory(); }
  /// Looks for mixed calls.
  void advance() override;
  Membership& membership() override { return *this; }
  void close(const Deadline& deadline) override;
  void abandon(std::exception_ptr error, const std::string& reason) override;
  bool usable() const override { return host_->usable(); }
  Counters counters() const override;

 protected:
  WorkPtr start_collective(const CollectiveArgs& args) override;
  WorkPtr run_collective(const CollectiveArgs& args) override;
  bool run_collective_in_stream(const CollectiveArgs& args, WorkPtr& launching) override;
  WorkPtr start_send(const SendArgs& args) override;
  /// Into device memory only messages that fill it: what is staged is copied whole.
  WorkPtr start_recv(const RecvArgs& args) override;
  WorkPtr run_send(const SendArgs& args) override;
  WorkPtr run_recv(const RecvArgs& args, Status& status) override;
  void apply(const GroupSettings& settings) override;

 private:
  DeviceCommunicator(std::shared_ptr<Communicator> host, DeviceOptions options);

  void check_peers() override { host_->membership().check_peers(); }
  void revoke(const std::string& why, std::uint64_t block) override;
  bool is_revoked() override { return host_->membership().is_revoked(); }
  bool discard() override;
  bool is_discarded() const override;
  void open_block(std::uint64_t block) override { host_->membership().open_block(block); }
  void close_block(std::uint64_t block) override { host_->membership().close_block(block); }
  void announce_block_end(std::uint64_t block) override;

  /// Are all arrays of this rank in host memory?
  bool is_on_host(const CollectiveArgs& args) const;
  /// The device of an array, which must be that of this group. Notes its stream.
  Device check_here(std::string_view verb, ConstBuffer buffer, CallStreams& streams) const;
  /// The same for what this rank uses of a collective, which tells the others if it is refused. `joins`: NCCL has it,
  /// also in a capture.
  CallStreams check_used(CollectiveArgs& args, bool joins);
  /// Where an operation runs that nobody waits for yet.
  static NcclLaunch::Where where_of(const CallStreams& streams);
  /// Tells the others where `check` refuses the memory of this rank. Mistakes in other arguments begin nothing.
  template <class Check>
  void check_or_tell(const CollectiveArgs& args, Check check);
  bool takes_nccl(const CollectiveArgs& args) const;
  /// Ends the pending operations on device memory, by NCCL or staged.
  void abandon_devices(const std::exception_ptr& error);
  std::shared_ptr<Communicator> wrap(std::shared_ptr<Communicator> child, const Deadline& deadline) const;

  /// A message of device memory.
  template <class Message, class Elements>
  WorkPtr start_staged(std::string_view verb, Message args, Elements Message::* elements);
  /// Null for a send of host memory that nothing keeps from starting now.
  WorkPtr start_unless_on_host(const SendArgs& args);

  class HostPath;  // host_path.h
  class NcclPath;  // nccl_path.h

  OwnerProcess owner_;
  std::shared_ptr<Communicator> host_;
  DeviceOptions options_;
  std::shared_ptr<Communicator> through_host_;     // the same ranks, for collectives that are staged or go by address
  std::shared_ptr<Communicator> signature_check_;  // the same ranks: compares calls beside NCCL
  std::unique_ptr<HostPath> staged_;
  std::unique_ptr<NcclPath> nccl_;        // null without NCCL
  std::optional<MixedCalls> mixed_;       // empty in a group of one rank
  std::atomic<bool> is_looking_ = false;  // a thread uses `mixed_`
  std::atomic<bool> has_been_closed_ = false;
};

}  // namespace samestep
