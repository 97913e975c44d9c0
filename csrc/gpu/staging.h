#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "communicator/communicator.h"
#include "gpu/gpu_memory.h"
#include "process/owner_process.h"
#include "process/progress_source.h"
#include "process/user_call.h"

namespace samestep {

/// Bytes of an array on a device. The runs of a segment lie one after another on the host.
struct StagedRun {
  std::size_t offset;  ///< from the beginning of the array
  std::size_t nbytes;
};
using StagedRuns = std::vector<StagedRun>;
std::size_t total_nbytes(const StagedRuns& runs);

/// A block of elements that is staged: copied to the host, processed there, copied back.
struct StagedSegment {
  const std::byte* in = nullptr;  ///< on the device; null: nothing is copied to the host
  StagedRuns in_runs = {};
  std::byte* out = nullptr;  ///< on the device; null: nothing is copied back
  StagedRuns out_runs = {};
  bool in_place = false;    ///< input and output share one buffer on the host
  bool gpu_direct = false;  ///< nothing is copied: `start` passes on device pointers once their streams are ready, but
                            ///< that of a receive at once; see Work::begin_writes
  /// How many bytes of `out_runs` the operation has written, where that is not known before. Empty: all.
  std::function<std::size_t(const Work&)> n_written = {};
  /// Starts the operation on the host.
  std::function<Communicator::WorkPtr(std::byte* in, std::byte* out)> start;
};

struct StagedOperation {
  enum class Type : std::uint8_t { collective, send, receive };
  std::vector<StagedSegment> parts = {};
  /// The remaining segments, if they depend on the result of `parts`, which must not be empty. Called once.
  std::function<std::vector<StagedSegment>()> then = {};
  std::vector<StreamHandle> after = {};  ///< streams in which the buffers are produced and used
  std::string called = user_call();
  /// A receive starts at once. Not derived from the buffers: those without elements may have no address.
  Type type = Type::collective;
  int dest = -1, tag = 0;        ///< of a send
  bool copies_in_first = false;  ///< outputs overlap later inputs: all inputs are on the host before anything starts
};

/// Operations of a host group on device memory, staged through pinned memory. Three segments of an operation are in
/// flight at a time, so that copies out, host operations and copies in overlap.
///
/// Collectives start on the host in the order of the calls, which is the same on all ranks. There is no thread: every
/// waiting thread advances all operations, also one that waits for something else (`ProgressSource`). Device memory is
/// accessed only in the two streams of this object. On the host the segments lie in memory that the ranks of a host
/// share, if there is some, so that their operations need no more copies.
class HostStaging final : public ProgressSource, public std::enable_shared_from_this<HostStaging> {
 public:
  /// `messages`: the group of sends and receives. `collectives`: that of collectives.
  HostStaging(std::shared_ptr<GpuLibrary> gpu, int device, std::shared_ptr<Communicator> messages,
              std::shared_ptr<Communicator> collectives);

  std::shared_ptr<Work> start(StagedOperation call);
  /// Whether there may be sends that have not started. Does not wait for the mutex.
  bool sends_are_pending() const { return sends_are_pending_; }
  /// Whether a send to this rank with this tag has not started on the host. What is sent next must start after it.
  bool has_unstarted_send(int dest, int tag);
  /// Copies from device to device, after the streams that `start` waits for, and before the operation completes.
  void copy_local(std::byte* to, const std::byte* from, std::size_t nbytes);
  /// Advances all operations. Never blocks.
  void progress();
  void advance() override;
  /// Ends all operations with `error`.
  void abandon(std::exception_ptr error);
  /// Frees the pinned memory of abandoned operations, once the pending copies have ended or a second has
  /// passed. To be called once both groups have been discarded.
  void release_retained();
  /// Whether the copies of all operations that `release_retained` found abandoned have ended. False if the device is
  /// lost.
  bool is_idle() noexcept;
  bool idle();
  HostStaging(const HostStaging&) = delete;
  HostStaging& operator=(const HostStaging&) = delete;
  ~HostStaging() override;

 private:
  class StagedWork;
  static constexpr std::size_t kInFlight = 3;
  /// Operations whose copies are in a stream at a time: a full stream would block the thread that adds to it while it
  /// holds the mutex.
  static constexpr std::size_t kMostCopies = 32;

  void record_ends();
  /// The mutex, unless a call of the runtime that another thread is in blocks for so long.
  std::unique_lock<std::mutex> lock_within(Seconds patience);
  /// Leaves both groups: the others would wait for an operation that has failed on this rank alone.
  void tell_others(const std::exception_ptr& error);
  std::exception_ptr take_abandonment();
  // With the mutex held:
  void step();
  void fail_all(const std::exception_ptr& error);
  void advance_all();
  /// The earliest operation that must start on the host before `work`, or `work` itself.
  StagedWork& next_to_begin(StagedWork& work);

  OwnerProcess owner_;
  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  std::shared_ptr<Communicator> messages_, collectives_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<EventPool> events_;
  GpuStream out_, in_;  // device to host, and back
  std::mutex mutex_;    // may be held in a call of the runtime that blocks
  bool is_registered_ = false;
  std::deque<std::shared_ptr<StagedWork>> pending_;
  std::atomic<bool> sends_are_pending_ = false;  // read without the mutex by the thread that has called them
  std::size_t n_copying_back_ = 0;               // segments
  std::unique_ptr<GpuEvent> end_;                // of both streams, once the groups have been discarded
  std::mutex abandonment_mutex_;
  std::exception_ptr abandonment_;               // that no thread has ended the operations with yet
  std::vector<std::shared_ptr<void>> retained_;  // segments of abandoned operations, which a transport may still use
};

}  // namespace samestep
