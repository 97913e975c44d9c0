#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "communicator/call.h"
#include "communicator/signature.h"
#include "communicator/work.h"
#include "core/buffer.h"
#include "core/deadline.h"
#include "core/piece.h"
#include "core/reduce_op.h"

namespace samestep {

inline constexpr int kAnySource = -1;
inline constexpr int kAnyTag = -1;

/// A group of ranks that communicate: the one interface between everything above (Python, gradient
/// buckets) and every engine below (self, MPI, ...).
///
/// Every verb starts an operation and returns its Work; nothing blocks but `Work::wait`, `split`,
/// `group` and `close`. All ranks start the operations of one group in the same order; any number may
/// be outstanding. Arguments are checked before anything is sent: InvalidArgumentError then means
/// that nothing has happened. A difference between ranks is a MismatchError on every rank, after
/// which the group goes on with the next operation.
///
/// Buffers are contiguous host memory unless `capabilities` says otherwise. Where a verb has `in` and
/// `out`, they are either the same memory (in place) or do not overlap. Each element is reduced in
/// pairwise order of rank, ((r0+r1)+(r2+r3)), half types in float32 rounded once, so every rank
/// holds the same bits.
///
/// `shape` is the caller's view of `in` for the comparison between ranks; engines move only counts.
///
/// Thread-safe: calls from several threads are taken one at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Name for error texts, e.g. "world" or "world/split 2".
  virtual const std::string& name() const = 0;
  /// Name of the engine, e.g. "self" or "mpi".
  virtual std::string_view engine() const = 0;

  using WorkPtr = std::shared_ptr<Work>;

  /// `out` on every rank = the reduction over all ranks' `in`. in.count == out.count.
  virtual WorkPtr all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) = 0;

  /// As all_reduce, but only root's `out` is written; elsewhere `out` is ignored.
  virtual WorkPtr reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root, const Shape& shape) = 0;

  /// `buffer` on every rank = root's.
  virtual WorkPtr broadcast(Buffer buffer, int root, const Shape& shape) = 0;

  /// `out` (size * in.count elements) = all ranks' `in`, in order of rank.
  virtual WorkPtr all_gather(ConstBuffer in, Buffer out, const Shape& shape) = 0;

  /// As all_gather, `counts[r]` elements from rank r; the same counts on all ranks.
  virtual WorkPtr all_gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts) = 0;

  /// As all_gather(_v), written at root only; elsewhere `out` is ignored.
  virtual WorkPtr gather(ConstBuffer in, Buffer out, int root, const Shape& shape) = 0;
  virtual WorkPtr gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts, int root) = 0;

  /// Block r of root's `in` (size * out.count elements; ignored elsewhere) goes to rank r's `out`.
  /// `shape` is that of `out`.
  virtual WorkPtr scatter(ConstBuffer in, Buffer out, int root, const Shape& shape) = 0;
  virtual WorkPtr scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out, int root) = 0;

  /// `in` is size blocks of out.count elements; `out` = the reduction over ranks of block `rank()`.
  /// `shape` is that of `out`. `out` may be block `rank()` of `in`.
  virtual WorkPtr reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) = 0;

  /// Block i of `in` goes to rank i; block i of `out` comes from rank i. Never in place.
  virtual WorkPtr all_to_all(ConstBuffer in, Buffer out, const Shape& shape) = 0;

  /// Blocks of `send_counts[i]` and `receive_counts[i]` elements; what i sends me is what I receive from i.
  virtual WorkPtr all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts, Buffer out,
                               std::span<const std::uint64_t> receive_counts) = 0;

  /// Done once every rank has entered.
  virtual WorkPtr barrier() = 0;

  /// One of the verbs that Call can describe.
  WorkPtr begin(const Call& call);
  /// The same for callers that wait at once: null if it is done already, else the Work to wait for.
  virtual WorkPtr now(const Call& call) { return begin(call); }

  /// Done once `in` may be reused. 0 <= dest < size, 0 <= tag < 2^31.
  virtual WorkPtr send(ConstBuffer in, int dest, int tag) = 0;

  /// Takes the next message with this source and tag (each may be "any") in the order it was sent.
  /// Another count or dtype than was sent is a MismatchError here, naming the sender; the message is
  /// consumed. `Work::status` says who sent it. A recv that is waited for in vain can be given up by
  /// `cancel`.
  virtual WorkPtr recv(Buffer out, int source, int tag) = 0;

  /// The same for callers that wait at once: null if it is done already, `status` then says who sent the message;
  /// else the Work to wait for.
  virtual WorkPtr send_now(const ConstBuffer& in, int dest, int tag) { return send(in, dest, tag); }
  virtual WorkPtr recv_now(const Buffer& out, int source, int tag, Status& status) {
    (void)status;
    return recv(out, source, tag);
  }
  /// Both, one after the other: a message of tag 0 is sent, one of any tag received. `sending` is what is left of the
  /// first.
  virtual WorkPtr sendrecv_now(const ConstBuffer& in, int dest, const Buffer& out, int source, Status& status,
                               WorkPtr& sending) {
    sending = send_now(in, dest, 0);
    return recv_now(out, source, kAnyTag, status);
  }

  /// Gives up a recv that no message has met yet. False if it was too late; then wait for it.
  virtual bool cancel(Work& recv) = 0;

  /// Ranks that give the same `color` form a group, ordered by (key, rank); a negative color gets
  /// null. Collective, blocks.
  virtual std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline) = 0;

  /// The group of `ranks` (of this group, distinct, in the order of their new ranks). Called by those
  /// ranks only, with the same list. Blocks.
  virtual std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline) = 0;

  /// Memory of at least `nbytes` on which operations of this group need no copies, or null where there is none.
  virtual std::shared_ptr<std::byte> allocate_shared(std::size_t nbytes) {
    (void)nbytes;
    return nullptr;
  }

  /// May every rank read and write every other rank's memory by itself? The same answer on all. Where it is true:
  virtual bool reaches_memory() const { return false; }
  /// the number by which other ranks know a place in this rank's memory,
  virtual std::uint64_t place_of(const void* data, std::size_t nbytes) const {
    (void)data, (void)nbytes;
    return 0;
  }
  /// whether it lies in memory that all share,
  virtual bool is_shared(const void* data, std::size_t nbytes) const {
    (void)data, (void)nbytes;
    return false;
  }
  /// and copies between pieces of this rank's memory and `peer`'s, whose places are `theirs`. False if `peer` has gone;
  /// the next collective tells why. What is `taken` will be written by `peer` next, and nobody else reads it.
  virtual bool pull(int peer, std::span<const Piece> pieces, bool taken) {
    (void)peer, (void)taken;
    return pieces.empty();
  }
  virtual bool push(int peer, std::span<const Piece> pieces) { return (void)peer, pieces.empty(); }

  /// Lets outstanding operations advance. Never blocks.
  virtual void progress() = 0;
  /// Learns which peers have gone, and ends what waits for them, as every wait does now and then. Never blocks.
  virtual void look_for_losses() {}

  /// Ends the group: all ranks meet once more, then everything is freed. After `abandon` nobody is waited
  /// for. Idempotent; afterwards every verb throws NotInitializedError.
  virtual void close(const Deadline& deadline) = 0;

  /// This rank gives up: outstanding operations and every later verb throw `error`; peers that wait for
  /// this rank, now or later, get a PeerLostError with `reason`. Nobody is waited for.
  virtual void abandon(std::exception_ptr error, const std::string& reason) = 0;

  /// Whether operations can still be started: not after `close`, `abandon` or an error that ended the group.
  virtual bool usable() const { return true; }

  /// Where each rank runs, for texts of errors. By rank.
  virtual void set_hosts(std::vector<std::string> hosts) { (void)hosts; }
  /// What ranks have agreed on before anything long is sent; "" or another word, and 0, leave it open. `way`: of long
  /// reductions, such as "halving"; `window_piece`: bytes of one rank's part in a window of them; `max_message`: bytes
  /// of a message.
  virtual void set_terms(const std::string& way, std::size_t window_piece, std::size_t max_message) {
    (void)way, (void)window_piece, (void)max_message;
  }
  /// Long reductions send messages of so many bytes, unless they were told otherwise before. The same on all ranks.
  virtual void prefer_pieces(std::size_t nbytes) { (void)nbytes; }
  /// More ranks than CPUs on this host: waiting ranks then give way at once. Groups made later inherit it.
  virtual void set_oversubscribed(bool oversubscribed) = 0;
  virtual bool oversubscribed() const = 0;

  /// Operations started and messages handed to the transport so far; for tests and tracing.
  struct Counters {
    std::uint64_t operations = 0;
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
  };
  virtual Counters counters() const = 0;
};

}  // namespace samestep
