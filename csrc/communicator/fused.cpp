#include "communicator/fused.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

/// Buffers as one run of bytes, from front to back.
class Run {
 public:
  explicit Run(std::span<const Buffer> buffers) : buffers_(buffers) {}

  void pack(std::byte* to, std::size_t nbytes) {
    each(nbytes, [&to](std::byte* from, std::size_t n) {
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
      const Buffer& buffer = buffers_[index_];
      const std::size_t n = std::min(nbytes, buffer.nbytes() - at_);
      if (n != 0) visit(static_cast<std::byte*>(buffer.data) + at_, n);
      nbytes -= n;
      at_ += n;
      if (at_ == buffer.nbytes()) {
        ++index_;
        at_ = 0;
      }
    }
  }

  std::span<const Buffer> buffers_;
  std::size_t index_ = 0;
  std::size_t at_ = 0;  // of that buffer
};

std::size_t total_nbytes(std::span<const Buffer> buffers) {
  std::size_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.nbytes();
  return total;
}

/// Of the buffers as one run, bytes `begin` to `end`, with their places on another rank.
std::vector<Piece> pieces_of(std::span<const Buffer> buffers, std::span<const std::uint64_t> theirs, std::size_t begin,
                             std::size_t end) {
  std::vector<Piece> pieces;
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

std::byte* Fused::memory() {
  if (memory_ == nullptr) memory_ = communicator_->allocate_shared(kPacked);
  if (memory_ == nullptr) memory_ = {new std::byte[kPacked], [](std::byte* block) { delete[] block; }};
  return memory_.get();
}

void Fused::run(const Call& call, const Deadline& deadline) {
  const Communicator::WorkPtr work = communicator_->now(call);
  if (work == nullptr) return;
  try {
    work->wait(deadline);
  } catch (const TimeoutError& error) {
    if (!work->done()) communicator_->abandon(std::current_exception(), error.what());
    throw;
  } catch (...) {  // a signal's: what the operation works on ends with the caller
    const std::string reason = "a wait of many buffers was left by an exception";
    if (!work->done()) communicator_->abandon(std::make_exception_ptr(Error(reason)), reason);
    throw;
  }
}

void Fused::meet_without(int peer, const Deadline& deadline) {
  run({Verb::barrier}, deadline);  // throws: it names who left first
  throw PeerLostError(str("the memory of rank ", peer, " of group '", communicator_->name(), "' cannot be reached"));
}

void Fused::broadcast(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  std::vector<Buffer> small;
  for (const Buffer& buffer : buffers) {
    if (buffer.nbytes() < kLarge) {
      small.push_back(buffer);
    } else {
      run({Verb::broadcast, {}, buffer, {}, root, Shape::flat(buffer.count)}, deadline);
    }
  }
  if (!communicator_->reaches_memory() || communicator_->size() == 1 || small.empty()) {
    broadcast_packed(small, root, deadline);
  } else {
    broadcast_in_turns(small, root, deadline);
  }
}

void Fused::broadcast_directly(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const auto size = static_cast<std::size_t>(communicator_->size()), n = buffers.size();
  std::vector<std::uint64_t> places(n), everyones(n * size);
  for (std::size_t i = 0; i < n; ++i) places[i] = communicator_->place_of(buffers[i].data, buffers[i].nbytes());
  run({Verb::all_gather,
       {places.data(), n, DType::uint64},
       {everyones.data(), n * size, DType::uint64},
       {},
       -1,
       Shape::flat(n)},
      deadline);
  // Of each receiver's bytes root copies one part in `size`, so that all ranks have as much to do.
  const std::size_t total = total_nbytes(buffers), cut = total - total / size;
  const bool at_root = communicator_->rank() == root;
  for (int peer = 0; peer < communicator_->size(); ++peer) {
    if (peer == communicator_->rank() || (!at_root && peer != root)) continue;
    const std::span theirs(everyones.data() + static_cast<std::size_t>(peer) * n, n);
    const bool copied = at_root ? communicator_->push(peer, pieces_of(buffers, theirs, cut, total))
                                : communicator_->pull(peer, pieces_of(buffers, theirs, 0, cut), false);
    if (!copied) meet_without(peer, deadline);
  }
  run({Verb::barrier}, deadline);
}

void Fused::broadcast_in_turns(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const std::size_t total = total_nbytes(buffers), of_each = (total + kTurns - 1) / kTurns;
  const std::size_t longest = std::clamp(of_each, kShortestTurn, kLongestTurn);
  const bool at_root = communicator_->rank() == root, only_reader = communicator_->size() == 2;
  const auto is_shared = [this](const Buffer& buffer) {
    return buffer.nbytes() == 0 || communicator_->is_shared(buffer.data, buffer.nbytes());
  };
  const bool packs = at_root && !std::ranges::all_of(buffers, is_shared);
  std::vector<std::uint64_t> places(buffers.size());
  Run packed(buffers);
  std::size_t turn = 0;
  for (std::size_t at = 0; at < total; ++turn) {
    const std::size_t nbytes = std::min(longest, total - at);
    // Root fills the one half while the others empty the other: all have met since they were done with it.
    std::byte* const half = memory() + turn % 2 * kLongestTurn;
    if (packs) packed.pack(half, nbytes);
    std::uint64_t place = packs ? communicator_->place_of(half, nbytes) : 0;
    run({Verb::broadcast, {}, {&place, 1, DType::uint64}, {}, root, Shape::flat(1)}, deadline);
    if (place == 0) return broadcast_directly(buffers, root, deadline);  // root does not pack
    if (!at_root) {
      std::uint64_t next = place - at;  // where the first buffer would begin
      for (std::size_t i = 0; i < buffers.size(); next += buffers[i++].nbytes()) places[i] = next;
      if (!communicator_->pull(root, pieces_of(buffers, places, at, at + nbytes), only_reader))
        meet_without(root, deadline);
    }
    at += nbytes;
  }
  run({Verb::barrier}, deadline);  // nobody looks into root's memory any more
}

void Fused::broadcast_packed(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const std::size_t total = total_nbytes(buffers);
  Run out(buffers), in(buffers);
  for (std::size_t at = 0; at < total;) {
    const std::size_t nbytes = std::min(kPacked, total - at);
    const Buffer piece{memory(), nbytes, DType::uint8};
    if (communicator_->rank() == root) out.pack(memory(), nbytes);
    run({Verb::broadcast, {}, piece, {}, root, Shape::flat(nbytes)}, deadline);
    if (communicator_->rank() != root) in.unpack(memory(), nbytes);
    at += nbytes;
  }
}

void Fused::all_reduce(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline) {
  for (const Buffer& buffer : buffers) require_reducible(buffer.dtype, reduction);  // before any has changed
  std::vector<Buffer> small;
  for (const Buffer& buffer : buffers) {
    if (buffer.nbytes() < kLarge) {
      small.push_back(buffer);
    } else {
      run({Verb::all_reduce, buffer, buffer, reduction, -1, Shape::flat(buffer.count)}, deadline);
    }
  }
  std::stable_sort(small.begin(), small.end(), [](const Buffer& a, const Buffer& b) { return a.dtype < b.dtype; });
  for (auto first = small.begin(); first != small.end();) {
    const auto last =
        std::find_if(first, small.end(), [&](const Buffer& buffer) { return buffer.dtype != first->dtype; });
    all_reduce_packed({first, last}, reduction, deadline);
    first = last;
  }
}

void Fused::all_reduce_packed(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline) {
  const std::size_t total = total_nbytes(buffers), size = itemsize(buffers[0].dtype);
  const std::size_t longest = kPacked / size * size;
  Run out(buffers), in(buffers);
  for (std::size_t at = 0; at < total;) {
    const std::size_t nbytes = std::min(longest, total - at);
    const Buffer piece{memory(), nbytes / size, buffers[0].dtype};
    out.pack(memory(), nbytes);
    run({Verb::all_reduce, piece, piece, reduction, -1, Shape::flat(piece.count)}, deadline);
    in.unpack(memory(), nbytes);
    at += nbytes;
  }
}

}  // namespace samestep
