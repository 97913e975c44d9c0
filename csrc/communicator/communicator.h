#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "communicator/collective_args.h"
#include "communicator/group_settings.h"
#include "communicator/membership.h"
#include "communicator/peer_memory.h"
#include "communicator/signature.h"
#include "communicator/work.h"
#include "core/buffer.h"
#include "core/deadline.h"
#include "core/reduce_op.h"

namespace samestep {

inline constexpr int kAnySource = -1;
inline constexpr int kAnyTag = -1;

/// The messages that a receive accepts. Any other message is a MismatchError.
enum class Fit : std::uint8_t {
  up_to,    ///< arrays of at most as many elements as there is room for
  exactly,  ///< arrays of exactly as many elements
  object,   ///< objects of any size
  probe,    ///< any message, which stays in the queue
};

/// One message to send. Done once `in` may be reused. 0 <= dest < size, 0 <= tag < 2^31.
struct SendArgs {
  ConstBuffer in;
  int dest;
  int tag = 0;
  bool is_object = false;  ///< the bytes of an object, which only a receive of objects accepts
};

/// Receives the next message with this source and tag (each may be "any"), in the order of sending. A message with more
/// elements than `out` has, with a number of elements that `fit` does not allow, with another dtype, or with an object
/// is consumed and raises a MismatchError that names the sender. `Work::status` has the sender and the number of
/// elements.
struct RecvArgs {
  Buffer out = {};
  int source = kAnySource;
  int tag = kAnyTag;
  Fit fit = Fit::up_to;
};

namespace checks {

/// The same checks as checks::arguments of a collective.
void arguments(const SendArgs& args, int size, bool needs_host_memory = true);
void arguments(const RecvArgs& args, int size, bool needs_host_memory = true);

}  // namespace checks

/// A group of ranks that communicate: the one interface between the layers above (Python, gradient buckets) and the
/// transports below (self, MPI, ...).
///
/// Every call starts an operation and returns its Work. Only `Work::wait`, `split`, `group` and `close` block. All
/// ranks start the operations of a group in the same order; any number may be pending. Arguments are checked before
/// anything is sent, so after an InvalidArgumentError nothing has happened. If ranks differ, the operation raises a
/// MismatchError on every rank, and the group continues with the next operation.
///
/// Buffers are contiguous host memory; a DeviceCommunicator also accepts memory of its device. Each element is reduced
/// in pairwise order of rank, ((r0+r1)+(r2+r3)), half types in float32 with one rounding, so every rank holds the same
/// bits.
///
/// Thread-safe: calls from several threads run one at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  /// Name for error texts, e.g. "world" or "world/split 2".
  const std::string& name() const { return info_.name; }
  /// Name of the transport, e.g. "self" or "mpi".
  std::string_view transport() const { return info_.transport; }

  using WorkPtr = std::shared_ptr<Work>;

  /// Checks the arguments of a collective and starts it.
  WorkPtr start(const CollectiveArgs& args);
  /// The same for blocking callers: null if the collective has already succeeded, else the Work to wait for.
  WorkPtr run(const CollectiveArgs& args);
  /// The same for device memory that is used in one stream: the collective is enqueued there, before what follows.
  /// False where that is not possible: nothing has begun. `launching`: null, or the Work to wait for until it has been
  /// enqueued.
  bool run_in_stream(const CollectiveArgs& args, WorkPtr& launching);

  WorkPtr start(const SendArgs& args);
  /// With `Fit::object`, `Work::object` has the bytes at the end. With `Fit::probe` the receive completes once there is
  /// a message of either kind. `Work::cancel` can cancel it.
  WorkPtr start(const RecvArgs& args);

  WorkPtr send(const ConstBuffer& in, int dest, int tag) { return start(SendArgs{in, dest, tag}); }
  WorkPtr send_object(const ConstBuffer& in, int dest, int tag) { return start(SendArgs{in, dest, tag, true}); }
  WorkPtr recv(const Buffer& out, int source, int tag, Fit fit = Fit::up_to) {
    return start(RecvArgs{out, source, tag, fit});
  }
  WorkPtr recv_object(int source, int tag) { return start(RecvArgs{{}, source, tag, Fit::object}); }
  WorkPtr probe(int source, int tag) { return start(RecvArgs{{}, source, tag, Fit::probe}); }

  /// As `run` above. `status`: the sender and tag, if the receive has completed.
  WorkPtr run(const SendArgs& args);
  WorkPtr run(const RecvArgs& args, Status& status);
  /// Both, one after the other. `sending`: the pending send, or null if it has completed.
  WorkPtr run(const SendArgs& sent, const RecvArgs& received, Status& status, WorkPtr& sending);

  /// Ranks with the same `color` form a group, ordered by (key, rank); a rank with a negative color gets null.
  /// `called`: the name of the group; empty: a default such as "world/split 0 color 1". Collective, blocks.
  virtual std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline,
                                              const std::string& called = "") = 0;

  /// Makes a group of `ranks`: distinct ranks of this group, in the order of their new ranks. Only those ranks call it,
  /// with the same list. `called`: the name of the group; empty: a default such as "world/group 0,2". Blocks.
  virtual std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline,
                                              const std::string& called = "") = 0;

  /// Access to the memory of other ranks of this host. Null if the transport has none.
  virtual PeerMemory* peer_memory() { return nullptr; }
  /// Who is in the group still, and how it ends on all ranks.
  virtual Membership& membership();

  /// Closes the group: a barrier of all ranks, then everything is freed. After `abandon` there is no barrier.
  /// Idempotent; afterwards every operation throws NotInitializedError.
  virtual void close(const Deadline& deadline) = 0;

  /// This rank leaves the group: its pending and all later operations throw `error`. Peers that wait for this rank, now
  /// or later, get a PeerLostError with `reason`. Does not wait for other ranks.
  virtual void abandon(std::exception_ptr error, const std::string& reason) = 0;

  /// Seconds that a caller waits for an operation of the group, for those who wait on behalf of another call. Relaxed
  /// order is enough, because it publishes nothing.
  double timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(double seconds) { timeout_.store(seconds, std::memory_order_relaxed); }

  /// Whether operations can be started: false after `close`, `abandon` or an error that ended the group.
  virtual bool usable() const { return true; }

  void configure(const GroupSettings& settings);
  /// Whether this host has more ranks than CPUs. Relaxed order is enough, because it only tunes waiting.
  bool oversubscribed() const { return oversubscribed_.load(std::memory_order_relaxed); }
  /// Collectives that only move data pass longer blocks to the transport without a copy, in any kind of memory. Up to
  /// this many bytes are read and written by the CPU.
  std::size_t max_inline() const { return info_.max_inline; }

  /// Operations started and messages handed to the transport so far; for tests and tracing.
  struct Counters {
    std::uint64_t operations = 0;
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
    std::uint64_t collectives = 0;  ///< of the operations; the same on all ranks that have made the same calls
  };
  virtual Counters counters() const = 0;

 protected:
  /// The properties of a group. They never change, except `oversubscribed`.
  struct Info {
    int rank;
    int size;
    std::string name;
    std::string_view transport;  ///< has static storage duration
    bool oversubscribed = false;
    std::size_t max_inline = std::numeric_limits<std::size_t>::max();
    bool needs_host_memory = true;  ///< the group accepts host memory only
  };
  explicit Communicator(Info info) : info_(std::move(info)), oversubscribed_(info_.oversubscribed) {}

  // `start` and `run` after the arguments have been checked.
  virtual WorkPtr start_collective(const CollectiveArgs& args) = 0;
  virtual WorkPtr run_collective(const CollectiveArgs& args) { return start_collective(args); }
  virtual bool run_collective_in_stream(const CollectiveArgs& args, WorkPtr& launching) {
    (void)args, (void)launching;
    return false;
  }
  virtual WorkPtr start_send(const SendArgs& args) = 0;
  virtual WorkPtr start_recv(const RecvArgs& args) = 0;
  virtual WorkPtr run_send(const SendArgs& args) { return start_send(args); }
  virtual WorkPtr run_recv(const RecvArgs& args, Status& status);
  virtual WorkPtr run_sendrecv(const SendArgs& sent, const RecvArgs& received, Status& status, WorkPtr& sending);
  virtual void apply(const GroupSettings& settings) = 0;

  /// Access to these functions of a group that this one is built on.
  struct Inner;

 private:
  const Info info_;
  std::atomic<bool> oversubscribed_;
  std::atomic<double> timeout_ = 1800.0;
};

struct Communicator::Inner {
  Communicator& group;

  WorkPtr start_collective(const CollectiveArgs& args) const { return group.start_collective(args); }
  WorkPtr run_collective(const CollectiveArgs& args) const { return group.run_collective(args); }
  WorkPtr start_send(const SendArgs& args) const { return group.start_send(args); }
  WorkPtr start_recv(const RecvArgs& args) const { return group.start_recv(args); }
  WorkPtr run_send(const SendArgs& args) const { return group.run_send(args); }
  WorkPtr run_recv(const RecvArgs& args, Status& status) const { return group.run_recv(args, status); }
};

}  // namespace samestep
