#include "communicator/fused_collectives.h"

#include <algorithm>
#include <chrono>
#include <type_traits>

#include "core/error.h"
#include "core/format.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"
#include "process/wait_hooks.h"

namespace samestep {
namespace {

/// Iterates over the bytes of several buffers as if they were contiguous.
template <class Buffer_>
class Run {
 public:
  explicit Run(std::span<const Buffer_> buffers) : buffers_(buffers) {}

  void pack(std::byte* to, std::size_t nbytes) {
    each(nbytes, [&to](const std::byte* from, std::size_t n) {
      kernels::copy(to, from, n);
      to += n;
    });
  }
  void unpack(const std::byte* from, std::size_t nbytes) {
    each(nbytes, [&from](std::byte* to, std::size_t n) {
      kernels::copy(to, from, n);
      from += n;
    });
  }

 private:
  template <class Visit>
  void each(std::size_t nbytes, Visit visit) {
    while (nbytes != 0) {
      const Buffer_& buffer = buffers_[index_];
      using Byte = std::conditional_t<std::is_same_v<Buffer_, Buffer>, std::byte, const std::byte>;
      const std::size_t n = std::min(nbytes, buffer.nbytes() - at_);
      if (n != 0) visit(static_cast<Byte*>(buffer.data) + at_, n);
      nbytes -= n;
      at_ += n;
      // Also skips buffers without bytes.
      if (at_ == buffer.nbytes()) {
        ++index_;
        at_ = 0;
      }
    }
  }

  std::span<const Buffer_> buffers_;
  std::size_t index_ = 0;
  std::size_t at_ = 0;  // of that buffer
};

std::size_t total_nbytes(std::span<const Buffer> buffers) {
  std::size_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.nbytes();
  return total;
}

/// The bytes `begin` to `end` of the concatenated buffers, with their addresses on another rank.
std::vector<RemoteSegment> pieces_of(std::span<const Buffer> buffers, std::span<const std::uint64_t> theirs,
                                     std::size_t begin, std::size_t end) {
  std::vector<RemoteSegment> pieces;
  std::size_t at = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const std::size_t first = std::max(begin, at), last = std::min(end, at + buffers[i].nbytes());
    if (first < last)
      pieces.push_back(
          {static_cast<std::byte*>(buffers[i].data) + (first - at), theirs[i] + (first - at), last - first});
    at += buffers[i].nbytes();
  }
  return pieces;
}

}  // namespace

FusedCollectives::Turn::Turn(FusedCollectives& owner, const Deadline& deadline) : owner_(owner) {
  constexpr std::chrono::milliseconds kLookEvery{20};  // for Ctrl-C
  std::unique_lock lock(owner.mutex_);
  while (!owner.freed_.wait_for(lock, kLookEvery, [&] { return !owner.is_taken_; })) {
    lock.unlock();
    wait_hooks().interrupt();
    if (deadline.passed()) {
      const std::string text = str("group '", owner.communicator_->name(), "': another thread of this rank has been ",
                                   "in a collective over many arrays for ", deadline.timeout().count(), " s");
      const auto error = std::make_exception_ptr(TimeoutError(text));
      owner.communicator_->abandon(error, text);  // the other ranks would wait for this call
      std::rethrow_exception(error);
    }
    lock.lock();
  }
  owner.is_taken_ = true;
}

FusedCollectives::Turn::~Turn() {
  {
    const std::lock_guard lock(owner_.mutex_);
    owner_.is_taken_ = false;
  }
  owner_.freed_.notify_one();
}

std::byte* FusedCollectives::memory() {
  if (memory_ == nullptr) memory_ = allocate(kMaxPackedBytes);
  return memory_.get();
}

std::shared_ptr<std::byte> FusedCollectives::allocate(std::size_t nbytes) {
  // In shared memory if possible: operations of the group then need no copy of their own.
  std::shared_ptr<std::byte> block = peer_memory_ == nullptr ? nullptr : peer_memory_->allocate(nbytes);
  if (block == nullptr) block = {new std::byte[nbytes], [](std::byte* bytes) { delete[] bytes; }};
  return block;
}

void FusedCollectives::run(const CollectiveArgs& call, const Deadline& deadline) {
  const Communicator::WorkPtr work = communicator_->run(call);
  // The frequent case: the collective has ended inside `run`.
  if (work == nullptr) return;
  try {
    work->wait(deadline);
  } catch (const TimeoutError& error) {
    // An operation that has ended by itself, perhaps with this very error, leaves nothing to abandon.
    if (!work->done()) communicator_->abandon(std::current_exception(), error.what());
    throw;
  } catch (const Error&) {  // of the operation
    throw;
  } catch (...) {  // from a signal handler: the caller frees the buffers, and does not send the next ones
    const std::string reason = "an exception interrupted a fused collective on this rank";
    communicator_->abandon(std::make_exception_ptr(Error(reason)), reason);
    throw;
  }
}

void FusedCollectives::throw_peer_lost(int peer, const Deadline& deadline) {
  run({CollectiveType::barrier}, deadline);  // throws an error that names the rank that left first
  throw PeerLostError(str("the memory of rank ", peer, " of group '", communicator_->name(), "' cannot be reached"));
}

void FusedCollectives::bcast(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const Turn turn(*this, deadline);
  std::vector<Buffer> small;
  for (const Buffer& buffer : buffers) {
    if (buffer.nbytes() < kMinUnpackedBytes) {
      small.push_back(buffer);
    } else {
      run({CollectiveType::bcast, {}, buffer, {}, root, Shape::flat(buffer.count)}, deadline);
    }
  }
  // Every rank takes the same branch: `has_cma` is the same on all ranks, and so are the sizes.
  if (peer_memory_ == nullptr || !peer_memory_->has_cma() || communicator_->size() == 1 || small.empty()) {
    bcast_packed(small, root, deadline);
  } else {
    bcast_double_buffered(small, root, deadline);
  }
}

void FusedCollectives::bcast_unpacked(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  try {
    bcast_in_place(buffers, root, deadline);
  } catch (...) {  // root may still write into them
    if (communicator_->rank() != root) {
      for (const Buffer& buffer : buffers) peer_memory_->withdraw(buffer.data, buffer.nbytes());
    }
    throw;
  }
}

void FusedCollectives::bcast_in_place(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const auto size = static_cast<std::size_t>(communicator_->size()), n = buffers.size();
  std::vector<std::uint64_t> addresses(n), gathered(n * size);
  for (std::size_t i = 0; i < n; ++i)
    addresses[i] = peer_memory_->to_remote_address(buffers[i].data, buffers[i].nbytes());
  run({CollectiveType::allgather,
       {addresses.data(), n, DType::uint64},
       {gathered.data(), n * size, DType::uint64},
       {},
       -1,
       Shape::flat(n)},
      deadline);
  // Of each receiver's bytes root copies one part in `size`, so that all ranks have as much to do.
  const std::size_t total = total_nbytes(buffers), cut = total - total / size;
  const bool at_root = communicator_->rank() == root;
  for (int peer = 0; peer < communicator_->size(); ++peer) {
    if (peer == communicator_->rank() || (!at_root && peer != root)) continue;
    const std::span theirs(gathered.data() + static_cast<std::size_t>(peer) * n, n);
    const bool copied = at_root ? peer_memory_->write_peer(peer, pieces_of(buffers, theirs, cut, total))
                                : peer_memory_->read_peer(peer, pieces_of(buffers, theirs, 0, cut), false);
    if (!copied) throw_peer_lost(peer, deadline);
  }
  run({CollectiveType::barrier}, deadline);
}

void FusedCollectives::bcast_double_buffered(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  // About `kPipelineDepth` segments: during the first one the readers are idle, and during the last one root is.
  const std::size_t total = total_nbytes(buffers), of_each = (total + kPipelineDepth - 1) / kPipelineDepth;
  const std::size_t longest = std::clamp(of_each, kMinPipelineBytes, kMaxPipelineBytes);
  const bool at_root = communicator_->rank() == root, only_reader = communicator_->size() == 2;
  // Only root can tell whether its buffers are shared. The others learn it from the first segment's address.
  const auto is_shared = [this](const Buffer& buffer) {
    return buffer.nbytes() == 0 || peer_memory_->is_shared(buffer.data, buffer.nbytes());
  };
  const bool packs = at_root && !std::ranges::all_of(buffers, is_shared);
  std::vector<std::uint64_t> addresses(buffers.size());
  Run packed(buffers);
  std::size_t turn = 0;
  for (std::size_t at = 0; at < total; ++turn) {
    const std::size_t nbytes = std::min(longest, total - at);
    // Root fills one half while the others read the other: since they last read this one, all have passed a barrier.
    std::byte* const half = memory() + turn % 2 * kMaxPipelineBytes;
    if (packs) packed.pack(half, nbytes);
    // Never 0 for packed data: an offset in shared memory has its highest bit set, and no object is at address 0.
    std::uint64_t place = packs ? peer_memory_->to_remote_address(half, nbytes) : 0;
    run({CollectiveType::bcast, {}, {&place, 1, DType::uint64}, {}, root, Shape::flat(1)}, deadline);
    if (place == 0) return bcast_unpacked(buffers, root, deadline);  // root does not pack
    if (!at_root) {
      std::uint64_t next = place - at;  // where the first buffer would begin
      for (std::size_t i = 0; i < buffers.size(); next += buffers[i++].nbytes()) addresses[i] = next;
      if (!peer_memory_->read_peer(root, pieces_of(buffers, addresses, at, at + nbytes), only_reader))
        throw_peer_lost(root, deadline);
    }
    at += nbytes;
  }
  run({CollectiveType::barrier}, deadline);  // after it no rank reads root's memory
}

void FusedCollectives::bcast_packed(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const std::size_t total = total_nbytes(buffers);
  Run out(buffers), in(buffers);
  for (std::size_t at = 0; at < total;) {
    // One piece of memory serves all messages, since `run` has ended before it is filled again.
    const std::size_t nbytes = std::min(kMaxPackedBytes, total - at);
    const Buffer piece{memory(), nbytes, DType::uint8};
    if (communicator_->rank() == root) out.pack(memory(), nbytes);
    run({CollectiveType::bcast, {}, piece, {}, root, Shape::flat(nbytes)}, deadline);
    if (communicator_->rank() != root) in.unpack(memory(), nbytes);
    at += nbytes;
  }
}

void FusedCollectives::allreduce(std::span<const ConstBuffer> in, std::span<const Buffer> out,
                                 const Reduction& reduction, const Deadline& deadline) {
  const auto call = [&](const ConstBuffer& from, const Buffer& to) {
    return CollectiveArgs{CollectiveType::allreduce, from, to, reduction, -1, Shape::flat(to.count)};
  };
  for (std::size_t i = 0; i < in.size(); ++i)
    checks::arguments(call(in[i], out[i]), 0, 1);  // before any buffer is changed
  const Turn turn(*this, deadline);
  std::vector<std::size_t> small;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (in[i].nbytes() < kMinUnpackedBytes) {
      small.push_back(i);
    } else {
      run(call(in[i], out[i]), deadline);
    }
  }
  // A message has one dtype. The order of equal elements must be the same on all ranks, which only a stable sort
  // promises.
  std::ranges::stable_sort(small, {}, [&](std::size_t i) { return in[i].dtype; });
  for (std::size_t i = 0; i < small.size();) {
    std::vector<ConstBuffer> from;
    std::vector<Buffer> to;
    for (const DType dtype = in [small[i]].dtype; i < small.size() && in[small[i]].dtype == dtype; ++i) {
      from.push_back(in[small[i]]);
      to.push_back(out[small[i]]);
    }
    allreduce_packed(from, to, reduction, deadline);
  }
}

void FusedCollectives::allreduce_list(std::span<const Buffer> buffers, const Reduction& reduction,
                                      const Deadline& deadline) {
  const Turn turn(*this, deadline);
  const std::size_t length = buffers.size(), count = buffers[0].count;
  const std::shared_ptr<std::byte> own =
      buffers[0].nbytes() > kMaxPackedBytes ? allocate(buffers[0].nbytes()) : nullptr;
  const Buffer sum{own ? own.get() : memory(), count, buffers[0].dtype};
  std::vector<kernels::Input> terms;
  std::vector<void*> results;
  for (const Buffer& buffer : buffers) {
    terms.push_back({buffer.data, reduction.factor});
    results.push_back(buffer.data);
  }
  const ReduceOp op = divides(reduction.op) ? ReduceOp::sum : reduction.op;
  kernels::reduce(sum.dtype, op, terms, sum.data, count);
  CollectiveArgs args{CollectiveType::allreduce, sum, sum, {after_factors(op)}, -1, Shape::flat(count)};
  args.compared_as = Signature{args.type, sum.dtype, reduction.op, -1, ListShape{length, count}.shape()};
  run(args, deadline);
  const kernels::Input result{sum.data};
  const double divisor = op == reduction.op ? 1 : static_cast<double>(length) * communicator_->size();
  kernels::reduce_into(sum.dtype, op == reduction.op ? ReduceOp::max : reduction.op, {&result, 1}, results, count,
                       divisor);
}

void FusedCollectives::allreduce_packed(std::span<const ConstBuffer> in, std::span<const Buffer> out,
                                        const Reduction& reduction, const Deadline& deadline) {
  const std::size_t total = total_nbytes(out), size = itemsize(out[0].dtype);
  // A message must not end inside an element.
  const std::size_t longest = kMaxPackedBytes / size * size;
  Run from(in);
  Run to(out);
  for (std::size_t at = 0; at < total;) {
    const std::size_t nbytes = std::min(longest, total - at);
    const Buffer piece{memory(), nbytes / size, out[0].dtype};
    from.pack(memory(), nbytes);
    run({CollectiveType::allreduce, piece, piece, reduction, -1, Shape::flat(piece.count)}, deadline);
    to.unpack(memory(), nbytes);
    at += nbytes;
  }
}

}  // namespace samestep
