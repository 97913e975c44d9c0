#include "node/single_copy_reduction.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace samestep {
namespace {

constexpr std::uint64_t kReducedAtOnce = 8;  // then other operations of the group make a step

/// Elements of a chunk of `nbytes`, in whole cache lines: two ranks must not write to one line.
std::size_t chunk_elements(std::size_t nbytes, std::size_t itemsize) {
  return std::max<std::size_t>(64, nbytes / itemsize / 64 * 64);
}

}  // namespace

SingleCopyReduction::SingleCopyReduction(const ReductionContext& task) : context_(task) {
  const auto size = static_cast<std::size_t>(task.size());
  n_blocks_ = task.type == CollectiveType::reduce_scatter ? size : 1;
  block_count_ = task.in.count / n_blocks_;
  chunk_count_ = chunk_elements(Thresholds::kChunkBytes, task.itemsize());
  is_dynamic_ = task.in.count >= 2 * size * chunk_count_;
  if (!is_dynamic_) {  // one chunk for each rank, always the same one, so that it stays in that CPU's cache
    // The smallest number of parts of each block for which all chunks together are a multiple of the ranks: for an
    // allreduce one chunk for each rank, for a reduce_scatter each rank's own block.
    const std::size_t parts = size / std::gcd(size, n_blocks_);
    chunk_count_ = std::max<std::size_t>(64, (block_count_ + parts * 64 - 1) / (parts * 64) * 64);
  }
  chunks_per_block_ = std::max<std::size_t>(1, (block_count_ + chunk_count_ - 1) / chunk_count_);
  n_chunks_ = n_blocks_ * chunks_per_block_;
  next_static_ = static_cast<std::size_t>(task.rank());
}

bool SingleCopyReduction::work() {
  if (peer_memory_lost_) return false;
  try {
    const std::uint64_t done = reduce_some();
    return is_dynamic_ ? is_count_complete(done) : are_static_chunks_done(done);
  } catch (const PeerMemoryLost&) {
    peer_memory_lost_ = true;
    return false;
  }
}

/// Reduces the next few chunks of this rank. Returns their number.
std::uint64_t SingleCopyReduction::reduce_some() {
  std::uint64_t done = 0;
  for (; done < kReducedAtOnce && !out_of_chunks_; ++done) {
    const std::uint64_t chunk = next_chunk();
    out_of_chunks_ = chunk >= n_chunks_;
    if (out_of_chunks_) break;
    reduce(chunk);
  }
  return done;
}

bool SingleCopyReduction::are_static_chunks_done(std::uint64_t done) {
  if (!out_of_chunks_) {
    if (done != 0) context_.progress_engine->note_progress();
    return false;
  }
  if (!std::exchange(notified_, true)) context_.set_step(1);
  return context_.all_at(1);
}

bool SingleCopyReduction::is_count_complete(std::uint64_t done) {
  ShmRegion& region = *context_.group->region;
  const std::size_t slot = context_.sequence % ShmRegion::kSlots;
  std::uint64_t& finished = context_.group->finished[slot];
  if (done != 0) {
    region.finished(context_.sequence).fetch_add(done, std::memory_order_acq_rel);  // pairs with the load below
    region.notify(context_.rank());
    context_.progress_engine->note_progress();
  }
  if (!out_of_chunks_) return false;
  // pairs with the addition above, on every rank: the results of all chunks are visible
  if (region.finished(context_.sequence).load(std::memory_order_acquire) != finished + n_chunks_) return false;
  finished += n_chunks_;
  context_.group->next_chunk[slot] +=
      n_chunks_ + static_cast<std::uint64_t>(context_.size());  // plus one vain claim of each rank
  return true;
}

std::uint64_t SingleCopyReduction::next_chunk() {
  if (is_dynamic_) {
    // The counter is never reset: each rank computes how far all earlier operations of the slot have advanced it.
    const std::uint64_t first = context_.group->next_chunk[context_.sequence % ShmRegion::kSlots];
    // relaxed: the number alone assigns the chunk; the header exchange has published the elements
    return context_.group->region->next_chunk(context_.sequence).fetch_add(1, std::memory_order_relaxed) - first;
  }
  const std::uint64_t chunk = next_static_;
  next_static_ += static_cast<std::size_t>(context_.size());
  return chunk;
}

/// A chunk of each rank's elements: in place if it can be mapped, else read by CMA.
std::span<const kernels::Input> SingleCopyReduction::inputs(std::size_t offset, std::size_t nbytes) {
  LocalPeers& host = *context_.group->peers;
  std::vector<kernels::Input>& inputs = context_.group->inputs;
  inputs.resize(static_cast<std::size_t>(context_.size()));
  for (int rank = 0; rank < context_.size(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    const ReductionDescriptor& posted = context_.descriptors[i];
    const int member = context_.group->member(rank);
    inputs[i].factor = posted.factor;
    if (rank == context_.rank()) {
      inputs[i].data = static_cast<const std::byte*>(context_.in.data) + offset;
    } else if (const std::byte* here = host.map_peer_memory(member, posted.in, context_.in.nbytes()); here != nullptr) {
      inputs[i].data = here + offset;
    } else {
      std::byte* const copy = context_.group->bounce.data() + i * nbytes;
      if (!host.read_peer(member, copy, posted.in + offset, nbytes)) throw PeerMemoryLost();
      inputs[i].data = copy;
    }
  }
  return inputs;
}

bool SingleCopyReduction::wants(int rank, std::size_t block) const {
  return context_.type == CollectiveType::reduce_scatter ? static_cast<std::size_t>(rank) == block
                                                         : context_.wanted_by(rank);
}

void SingleCopyReduction::reduce(std::uint64_t chunk) {
  const std::size_t block = chunk / chunks_per_block_, first = chunk % chunks_per_block_ * chunk_count_;
  if (first >= block_count_) return;
  const std::size_t count = std::min(chunk_count_, block_count_ - first), nbytes = count * context_.itemsize();
  const std::size_t in_offset = (block * block_count_ + first) * context_.itemsize();
  const std::size_t out_offset = first * context_.itemsize();
  const auto size = static_cast<std::size_t>(context_.size());
  LocalPeers& host = *context_.group->peers;
  std::vector<std::byte>& bounce = context_.group->bounce;
  // One place for each rank's elements, and one for the result if no output can be mapped.
  if (bounce.size() < (size + 1) * nbytes) bounce.resize((size + 1) * nbytes);

  // No other rank touches this chunk of any buffer, so arrays may be in place: the kernel reads elements before it
  // stores over them.
  const std::span<const kernels::Input> from = inputs(in_offset, nbytes);
  std::vector<void*>& here = context_.group->outs;           // mapped outputs
  std::vector<int>& by_cma = context_.group->written_peers;  // ranks whose outputs are written by CMA
  here.clear();
  by_cma.clear();
  for (int rank = 0; rank < context_.size(); ++rank) {
    if (!wants(rank, block)) continue;
    const std::uint64_t there = context_.descriptor_of(rank).out;
    if (rank == context_.rank()) {
      here.push_back(static_cast<std::byte*>(context_.out.data) + out_offset);
    } else if (std::byte* at = host.map_peer_memory(context_.group->member(rank), there, context_.out.nbytes())) {
      here.push_back(at + out_offset);
    } else {
      by_cma.push_back(rank);
    }
  }
  if (here.empty()) here.push_back(bounce.data() + size * nbytes);
  context_.reduce(from, here, count);
  for (const int rank : by_cma) {
    const std::uint64_t to = context_.descriptor_of(rank).out + out_offset;
    if (!context_.group->fence->write(static_cast<std::size_t>(rank), to, here[0], nbytes)) throw PeerMemoryLost();
  }
}

}  // namespace samestep
