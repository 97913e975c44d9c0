#include "communicator/fused.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace samestep {
namespace {

/// Buffers as one run of bytes, from front to back.
class Run {
 public:
  explicit Run(std::span<const Buffer> buffers) : buffers_(buffers) {}

  void pack(std::byte* to, std::size_t nbytes) {
    each(nbytes, [&to](std::byte* from, std::size_t n) {
      std::memcpy(to, from, n);
      to += n;
    });
  }
  void unpack(const std::byte* from, std::size_t nbytes) {
    each(nbytes, [&from](std::byte* to, std::size_t n) {
      std::memcpy(to, from, n);
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

}  // namespace

std::byte* Fused::memory() {
  if (memory_ == nullptr) memory_ = communicator_->allocate_shared(kReducePiece);
  if (memory_ == nullptr) memory_ = {new std::byte[kReducePiece], [](std::byte* block) { delete[] block; }};
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
  }
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
  broadcast_packed(small, root, deadline);
}

void Fused::broadcast_packed(std::span<const Buffer> buffers, int root, const Deadline& deadline) {
  const std::size_t total = total_nbytes(buffers);
  const bool at_root = communicator_->rank() == root;
  const bool shares = communicator_->shares_memory();
  std::size_t longest = shares ? kFirstPiece : kReducePiece;
  Run run_of(buffers);
  std::size_t turn = 0;
  for (std::size_t at = 0; at < total; ++turn) {
    const std::size_t nbytes = std::min(longest, total - at);
    // Root fills the one half while the others empty the other: all have met since they were done with it.
    std::byte* const piece = memory() + (shares ? turn % 2 * kBroadcastPiece : 0);
    if (at_root) run_of.pack(piece, nbytes);
    std::uint64_t place = shares && at_root ? communicator_->place_of(piece, nbytes) : 0;
    if (shares) run({Verb::broadcast, {}, {&place, 1, DType::uint64}, {}, root, Shape::flat(1)}, deadline);
    const std::byte* from = piece;
    if (place == 0) {  // ranks cannot look into root's piece
      run({Verb::broadcast, {}, {piece, nbytes, DType::uint8}, {}, root, Shape::flat(nbytes)}, deadline);
    } else if (!at_root) {
      from = communicator_->at(root, place, nbytes);
    }
    if (!at_root) run_of.unpack(from, nbytes);
    at += nbytes;
    if (shares) longest = std::min(2 * longest, kBroadcastPiece);
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
  const std::size_t longest = kReducePiece / size * size;
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
