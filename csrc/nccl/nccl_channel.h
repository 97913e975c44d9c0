#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "communicator/communicator.h"
#include "nccl/further_devices.h"
#include "nccl/gpu_memory.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// What an operation needs to begin.
struct NcclLaunch {
  std::string what;                 ///< for error texts, e.g. "allreduce of float32[3]"
  std::vector<StreamHandle> after;  ///< streams in which its buffers are produced
  std::function<void(NcclLibrary::Comm, NcclLibrary::Stream)> calls;
  Communicator::WorkPtr agreement;            ///< on the host, that all ranks do the same; may be null
  std::vector<std::shared_ptr<void>> memory;  ///< lives until the operation has ended
  /// More calls, each made once NCCL has put what came before into the stream.
  std::vector<std::function<void(NcclLibrary::Comm, NcclLibrary::Stream)>> then = {};
};

/// One NCCL communicator, the one stream its operations run in, and a thread that watches them. With `further` devices
/// one communicator and stream for each.
///
/// Nothing here blocks on the device. The thread looks at outstanding operations every few milliseconds: an error that
/// NCCL reports, a rank that has gone or one that does something else, and a deadline that has passed each abort the
/// communicator on this rank and are told to the others through `host`. Every later call then throws the same error.
/// What was written to the buffers of aborted operations is undefined.
class NcclChannel : public std::enable_shared_from_this<NcclChannel> {
 public:
  struct Options {
    std::shared_ptr<GpuLibrary> gpu;
    std::shared_ptr<NcclLibrary> nccl;
    int device = 0;
    Seconds timeout{600};
    std::vector<int> further = {};  ///< other devices of this rank, as many on each
  };

  /// Collective over `host`, which also tells other ranks of failures. `agreement`: a group of the same ranks for the
  /// channel's own use. Throws PeerLostError or TimeoutError if not all ranks come, Error if NCCL does not start.
  static std::shared_ptr<NcclChannel> open(Options options, std::shared_ptr<Communicator> host,
                                           std::shared_ptr<Communicator> agreement, const Deadline& deadline);
  ~NcclChannel();

  /// One after the other, in the order of the calls; while NCCL says that one is in progress others may look, give up
  /// or close.
  std::shared_ptr<Work> launch(NcclLaunch launch);

  NcclLibrary& nccl() const { return *options_.nccl; }
  GpuLibrary& gpu() const { return *options_.gpu; }
  const Options& options() const { return options_; }
  const FurtherDevices& further() const { return further_; }

  /// What is to be called, by the thread that watches, where this ends because ranks differ.
  void when_ranks_differ(std::function<void(const std::exception_ptr&)> tell);
  /// Gives up at once: outstanding operations end with `error`. Does not block.
  void abandon(std::exception_ptr error);
  /// Waits for what is outstanding, until `deadline`, and ends. Not collective.
  void close(const Deadline& deadline);

 private:
  struct Operation;
  class NcclWork;
  class Turn;

  NcclChannel(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> agreement);
  void begin(const Deadline& deadline);
  void throw_if_broken() const;
  /// Waits, without the mutex, until NCCL has done what was last asked of it. Throws what has ended the channel
  /// meanwhile, with the lock given back or not.
  void settle(std::unique_lock<std::mutex>& lock, const std::string& act, const Deadline& deadline);
  bool has_settled(const std::string& act);
  std::shared_ptr<Work> work_on(std::shared_ptr<Operation> operation);
  void watch();
  void look();
  std::exception_ptr trouble(Operation& operation, Clock::time_point now);
  /// That `deadline`, which has passed, was too short for an operation. `missing`: who has not come, if that is known.
  std::exception_ptr late(const Operation& operation, const Deadline& deadline, const std::string& missing);
  /// What tells that a peer has gone, or null.
  std::exception_ptr lost_peer();
  /// What the host knows of a failure, or null.
  std::exception_ptr cause_on_host();
  /// Ends all with `error`. The mutex is held; the watcher aborts the communicator.
  void fail(std::exception_ptr error, bool tell);
  /// With what has ended the channel. The mutex is held.
  void end_operations();
  void stop();

  Options options_;
  std::shared_ptr<Communicator> host_, agreement_;
  std::unique_ptr<GpuStream> stream_;
  FurtherDevices further_;
  std::vector<Communicator::WorkPtr> alive_;  // one receive from each peer, which ends if the peer does

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NcclLibrary::Comm comm_ = nullptr;
  std::exception_ptr broken_;
  std::function<void(const std::exception_ptr&)> when_ranks_differ_;
  std::list<std::shared_ptr<Operation>> under_way_;
  std::vector<const Turn*> turns_;  // who launches, and who waits for it
  std::uint64_t sequence_ = 0;
  bool ending_ = false;
  std::thread watcher_;
  std::byte never_{};
};

}  // namespace samestep
