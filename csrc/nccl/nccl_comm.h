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
#include "gpu/gpu_memory.h"
#include "nccl/extra_devices.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// An operation to launch.
struct NcclLaunch {
  std::string what;                 ///< for error texts, e.g. "allreduce of float32[3]"
  std::vector<StreamHandle> after;  ///< streams that produce its buffers
  std::function<void(NcclLibrary::Comm, NcclLibrary::Stream)> calls;
  Communicator::WorkPtr signature_check;      ///< the comparison of signatures on the host; may be null
  std::vector<std::shared_ptr<void>> memory;  ///< kept until the operation has ended
  /// Made once NCCL has enqueued `calls`, before the end of the operation is recorded; may be null.
  std::function<void(NcclLibrary::Stream)> once_enqueued = nullptr;
};

/// An NCCL communicator, the one stream in which its operations run, and a thread that watches them. With `extra`
/// devices there are one communicator and stream for each.
///
/// Nothing here blocks on the device. The thread checks outstanding operations every few milliseconds. An error of
/// NCCL, a lost or different peer, or a deadline that has passed aborts the communicator on this rank, and is reported
/// to the others through `host`. Every later call throws the same error. The contents of the buffers of aborted
/// operations are undefined.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  struct Options {
    std::shared_ptr<GpuLibrary> gpu;
    std::shared_ptr<NcclLibrary> nccl;
    int device = 0;
    Seconds timeout{600};
    std::vector<int> extra = {};  ///< other devices of this rank; each rank has the same number
  };

  /// Collective over `host`, which also reports failures to other ranks. `signature_check`: a group of the same ranks
  /// for signature checks. Throws PeerLostError or TimeoutError if not all ranks call it, Error if NCCL does not start.
  static std::shared_ptr<NcclComm> open(Options options, std::shared_ptr<Communicator> host,
                                        std::shared_ptr<Communicator> signature_check, const Deadline& deadline);
  ~NcclComm();

  /// Launches operations in the order of the calls. While NCCL reports that a launch is in progress, other threads may
  /// poll, abandon or close.
  std::shared_ptr<Work> launch(NcclLaunch launch);

  NcclLibrary& nccl() const { return *options_.nccl; }
  GpuLibrary& gpu() const { return *options_.gpu; }
  const Options& options() const { return options_; }
  const ExtraDevices& extra_devices() const { return extra_; }

  /// Sets what the watching thread calls if this communicator ends because ranks differ.
  void set_on_mismatch(std::function<void(const std::exception_ptr&)> tell);
  /// Ends outstanding operations with `error`. Does not block.
  void abandon(std::exception_ptr error);
  /// Waits for outstanding operations until `deadline`, and destroys the communicator. Not collective.
  void close(const Deadline& deadline);

 private:
  struct Operation;
  class NcclWork;
  class Turn;

  NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check);
  void begin(const Deadline& deadline);
  void throw_if_broken() const;
  /// Waits without the mutex until NCCL has completed the last request. Throws the error that has ended this
  /// communicator meanwhile; then `lock` may be locked or not.
  void wait_until_ready(std::unique_lock<std::mutex>& lock, const std::string& act, const Deadline& deadline);
  bool is_ready(const std::string& act);
  std::shared_ptr<Work> work_on(std::shared_ptr<Operation> operation);
  void watch();
  void poll();
  std::exception_ptr check_operation(Operation& operation, Clock::time_point now);
  /// The TimeoutError of an operation whose `deadline` has passed. `missing`: the ranks that are late, if known.
  std::exception_ptr timeout_error(const Operation& operation, const Deadline& deadline, const std::string& missing);
  /// The error of a lost peer, or null.
  std::exception_ptr lost_peer();
  /// The cause of a failure as far as the host knows it, or null.
  std::exception_ptr host_cause();
  /// Ends all operations with `error`; the watching thread aborts the communicator. Requires the mutex.
  void fail(std::exception_ptr error, bool tell);
  /// Ends all operations with `broken_`. Requires the mutex.
  void end_operations();
  void stop();

  Options options_;
  std::shared_ptr<Communicator> host_, signature_check_;
  std::unique_ptr<GpuStream> stream_;
  ExtraDevices extra_;
  std::vector<Communicator::WorkPtr> liveness_receives_;  // one receive from each peer, which fails if the peer is lost

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NcclLibrary::Comm comm_ = nullptr;
  std::exception_ptr broken_;
  std::function<void(const std::exception_ptr&)> on_mismatch_;
  std::list<std::shared_ptr<Operation>> pending_;
  std::vector<const Turn*> turns_;  // the launching thread, and those that wait to launch
  std::uint64_t sequence_ = 0;
  bool ending_ = false;
  std::thread watcher_;
  std::byte unused_byte_{};
  bool launching_ = false;  // a thread makes calls of NCCL and the GPU runtime without the mutex
};

}  // namespace samestep
