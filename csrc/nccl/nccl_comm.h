#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "communicator/communicator.h"
#include "gpu/gpu_memory.h"
#include "nccl/call_log.h"
#include "nccl/launch_queue.h"
#include "nccl/nccl_address.h"
#include "nccl/nccl_library.h"
#include "nccl/nccl_member.h"
#include "process/owner_process.h"
#include "process/progress_source.h"

namespace samestep {

/// `enqueue` makes the calls. Calls of equal `connections` need the same connections between ranks, which NCCL makes
/// when it first needs them.
struct NcclCalls {
  std::function<void(NcclLibrary::Comm, NcclLibrary::Stream)> enqueue;
  std::uint64_t connections = 0;
};

/// An operation to launch.
struct NcclLaunch {
  /// In which stream NCCL gets it.
  enum class Where : std::uint8_t {
    own_stream,  ///< that of the communicator, after what `after` have now
    in_stream,   ///< the only one of `after`: what follows there need not wait
    captured,    ///< the same, which is being captured into a graph
  };

  Signature compared;                    ///< what ranks compare beside it
  bool is_list = false;                  ///< of arrays, whose number is the first extent
  std::vector<StreamHandle> after = {};  ///< streams that produce its buffers
  Where where = Where::own_stream;
  NcclCalls calls = {};
  std::vector<std::shared_ptr<void>> memory = {};  ///< kept until the operation has ended

  std::string describe() const;  ///< for error texts, e.g. "allreduce of float32[3] with op sum on the device"
};

/// An NCCL communicator, the one stream in which its operations run, and a thread that watches them.
///
/// Where NCCL may wait for other ranks, because it starts or needs a connection for the first time, the thread of the
/// device's LaunchQueue makes the calls. Without those, and if nothing is in that queue, the caller makes them, without
/// locks. Nothing here blocks on the device or on other ranks but what waits for a Work, and the end.
///
/// The watching thread checks outstanding operations every few milliseconds. An error of NCCL, a lost or different
/// peer, or a deadline that has passed aborts the communicator on this rank, and is reported to the others through
/// `host`. Every later call throws the same error. The contents of the buffers of aborted operations are undefined.
///
/// That thread alone ends NCCL, and keeps this object until it has. Others wait for it until a deadline, and then leave
/// it alone: what `make` and `open` return is a pointer whose last copy, dropped, only lets the thread end.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  struct Options {
    std::shared_ptr<GpuLibrary> gpu;
    std::shared_ptr<NcclLibrary> nccl;
    int device = 0;
    Seconds timeout{600};
    std::weak_ptr<ProgressSource> beside = {};  ///< advanced by the watching thread while operations are outstanding
  };

  /// Starts NCCL with the first operation. `host` reports failures to other ranks. `signature_check`: a group of the
  /// same ranks for signature checks.
  static std::shared_ptr<NcclComm> make(Options options, std::shared_ptr<Communicator> host,
                                        std::shared_ptr<Communicator> signature_check);
  /// Starts NCCL now. Collective. Throws PeerLostError or TimeoutError if not all ranks call it, Error if NCCL does not
  /// start.
  static std::shared_ptr<NcclComm> open(Options options, std::shared_ptr<Communicator> host,
                                        std::shared_ptr<Communicator> signature_check, const Deadline& deadline);
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Launches operations in the order of the calls. The first time the ranks exchange NCCL's address on the host. Waits
  /// until NCCL has one that is captured.
  std::shared_ptr<Work> launch(NcclLaunch launch);
  /// The same for what goes into the caller's stream. Null if NCCL has it, else the Work whose `make_stream_wait` waits
  /// for that.
  std::shared_ptr<Work> run(NcclLaunch launch);
  /// A comparison without an operation. A difference ends the communicator, as that of an operation does.
  void compare(const Signature& signature);

  /// Whether it has failed, or has ended.
  bool is_over() const { return state_ >= State::failed_starting; }

  NcclLibrary& nccl() const { return *options_.nccl; }
  GpuLibrary& gpu() const { return *options_.gpu; }
  const Options& options() const { return options_; }

  /// Ends outstanding operations with `error`. Does not wait for the device.
  void abandon(std::exception_ptr error);
  /// Waits for outstanding operations until `deadline`, and destroys the communicator. Throws TimeoutError if NCCL does
  /// not end by then.
  void close(const Deadline& deadline);
  /// The error that has ended blocking calls after they had returned, unless a call has thrown it since. Or null.
  std::exception_ptr unheard() const;

  /// After a failure: whether the device uses no memory of operations any more. Takes no lock.
  bool device_has_ended() const;
  /// Waits for that until `deadline`.
  void wait_for_device(const Deadline& deadline) const;

 private:
  class NcclWork;

  /// An operation in progress, shared by the threads that launch and watch it and the callers that wait for it.
  struct Operation {
    Operation(NcclLaunch&& given, const Deadline& until) : launch(std::move(given)), deadline(until) {}

    NcclLaunch launch;  // `memory` is kept until the end, `calls` until they are made
    std::uint64_t sequence = 0;
    std::uint64_t logged = 0;  // in the CallLog
    std::uint64_t turn = 0;    // among all launches; set before `launched`
    Clock::time_point started = Clock::now();
    Clock::time_point peer_lost_at{};  // when that was first seen; guarded by the mutex
    Deadline deadline;                 // the group's, or that of a longer wait; guarded by the mutex
    std::vector<std::shared_ptr<GpuEvent>> after;
    std::shared_ptr<GpuEvent> end;       // set before `launched`; null in a capture
    std::exception_ptr error = nullptr;  // set before `ended`
    // Each is stored after what it tells of, and pairs with loads by waiting threads.
    std::atomic<bool> launched = false;   // NCCL has enqueued all of it
    std::atomic<bool> completed = false;  // the device has finished it
    std::atomic<bool> ended = false;

    bool is_captured() const { return launch.where == NcclLaunch::Where::captured; }
    /// Whether the device completes it after `other`, since it was enqueued behind that in the same stream.
    bool follows(const Operation& other) const {
      if (launch.where != other.launch.where || turn < other.turn) return false;
      if (launch.where == NcclLaunch::Where::own_stream) return true;
      return launch.after.front() == other.launch.after.front();
    }
    void finish(std::exception_ptr with) {
      if (ended) return;
      error = std::move(with);
      ended = true;
    }
  };

  /// What follows what: see `move`.
  enum class State : std::uint8_t {
    idle,              ///< no operation has had its turn
    starting,          ///< a launch starts NCCL
    ready,             ///< NCCL has started
    launching,         ///< a launch is in calls of NCCL, without the mutex
    closing,           ///< `close` has seen the end of all operations: nothing may be launched any more
    failed_starting,   ///< has failed; the start notices it soon
    failed_launching,  ///< has failed; the calls return at the latest when the thread aborts the parent
    failed,            ///< has failed, and nobody is in NCCL
    closed,            ///< the thread may destroy NCCL
    releasing,         ///< the thread ends NCCL, for as long as the device, or other ranks, let it wait
    ended,
  };

  NcclComm(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check);
  void throw_if_broken() const;
  /// Before the first operation.
  void prepare();
  /// Launches, or lets the thread of the queue do so.
  std::shared_ptr<Operation> enqueue(NcclLaunch launch);
  std::shared_ptr<NcclWork> work_on(std::shared_ptr<Operation> operation);

  // nccl_threads.cpp: how operations begin, in the thread of the queue or in the caller's
  /// Starts NCCL, once the address has arrived.
  void start_nccl(const NcclAddress::Until& until);
  /// From here on the deadline and the signature check of an operation are watched, and its memory is kept.
  void watch_from_now(const std::shared_ptr<Operation>& operation);
  /// Whether its calls return before the other ranks come.
  bool waits_for_nobody(const Operation& operation) const;
  /// In an operation's turn in the queue: starts NCCL before the first one, and makes the calls.
  void begin(const std::shared_ptr<Operation>& operation);
  /// What was begun has ended, with this error or none.
  void end_launch(Operation& operation, std::exception_ptr error);
  void make_calls(Operation& operation);
  /// Waits until NCCL has completed the last request. Throws the error that has ended this communicator meanwhile.
  void wait_until_ready(const std::string& act, const NcclAddress::Until& until);

  // nccl_threads.cpp: what the watching thread does
  void watch();
  void poll();
  /// Looks at what NCCL says and at all operations. Requires the mutex, which it may release meanwhile.
  void check_all(std::unique_lock<std::mutex>& lock);
  /// Asks the device whether it has finished an operation, unless another thread asks, and does so for `patience`. To
  /// be called without the mutex, because calls of the GPU runtime may block: deadlines that other threads watch need
  /// the mutex. Returns the error of a device that is lost, or null.
  std::exception_ptr ask_device(Operation& operation, Seconds patience = {});
  /// The same for all operations.
  std::exception_ptr ask_for_all(Seconds patience = {});
  std::exception_ptr check_operation(Operation& operation, Clock::time_point now);
  /// Returns the first error. Requires the mutex.
  std::exception_ptr check_operations();
  /// The TimeoutError of an operation whose `deadline` has passed.
  std::exception_ptr timeout_error(const Operation& operation, const Deadline& deadline);
  /// The error of a rank that has left, or null.
  std::exception_ptr lost() const {
    return signature_check_->membership().lost("device operations of group '" + host_->name() + "'");
  }
  /// The cause of a failure as far as the host knows it, or null.
  std::exception_ptr host_cause();
  /// The same after an error of NCCL, which only knows that something is wrong: the host soon knows what. Requires the
  /// mutex, which it releases meanwhile.
  std::exception_ptr await_host_cause(std::unique_lock<std::mutex>& lock);
  /// Compares calls with those of other ranks. Returns an error that this has, or null. Requires the mutex.
  std::exception_ptr compare_calls();

  // nccl_comm.cpp: how it ends
  /// Requires the mutex.
  void move(State to);
  /// A launch is no longer in NCCL. Requires the mutex. `next`: unless this has failed meanwhile.
  void leave_nccl(State next);
  /// Ends all operations with `error`; the watching thread aborts the communicator. `tell`: the other ranks, unless
  /// they know. Requires the mutex.
  void fail(std::exception_ptr error, bool tell = true);
  /// Nobody uses this any more.
  void drop();
  /// The watching thread's last act: ends NCCL. Requires the mutex, which it releases meanwhile.
  void release(std::unique_lock<std::mutex>& lock);
  /// Waits until the watching thread has come so far. False, without it from then on, if it has not by `deadline`.
  bool await_thread(State reached, const Deadline& deadline);

  Options options_;
  std::shared_ptr<Communicator> host_, signature_check_;
  LaunchQueue& queue_;  // of the device
  NcclMember member_;
  std::weak_ptr<NcclComm> user_;  // of what `make` returned: a Work, and an operation in the queue, has a copy
  std::once_flag prepared_;
  // Set by `prepare`, as the watching thread is.
  OwnerProcess owner_;
  std::unique_ptr<NcclAddress> address_;

  std::mutex asking_;  // held by the thread that asks the device; nobody waits for it
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_ = State::idle;  // set with the mutex held; pairs with loads without it
  std::exception_ptr broken_;
  mutable std::exception_ptr unheard_;
  CallLog log_;
  std::list<std::shared_ptr<Operation>> pending_;
  std::vector<std::shared_ptr<void>> for_graphs_;     // memory of captured operations, which run whenever graphs do
  std::optional<Clock::time_point> looked_at_peers_;  // has a value while graphs may hold operations
  std::unordered_set<std::uint64_t> connected_;       // `NcclCalls::connections` that exist
  std::uint64_t sequence_ = 0;
  std::uint64_t turns_ = 0;  // of launches; used in those alone
  std::thread watcher_;
};

}  // namespace samestep
