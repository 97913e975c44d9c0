#include "node/direct_reduction.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace samestep {
namespace {

constexpr std::uint64_t kChunksAtOnce = 8;  // then others may have their turn

/// Elements of a chunk of `nbytes`, whole cache lines of them.
std::size_t chunk_elements(std::size_t nbytes, std::size_t itemsize) {
  return std::max<std::size_t>(64, nbytes / itemsize / 64 * 64);
}

}  // namespace

DirectReduction::DirectReduction(const ReductionTask& task) : task_(task) {
  const auto size = static_cast<std::size_t>(task.size());
  n_blocks_ = task.verb == Verb::reduce_scatter ? size : 1;
  block_count_ = task.in.count / n_blocks_;
  chunk_count_ = chunk_elements(Crossings::kChunkBytes, task.itemsize());
  claims_ = task.in.count >= 2 * size * chunk_count_;
  if (!claims_) {  // one chunk for each rank, so that it stays in the caches it is in
    const std::size_t parts = size / std::gcd(size, n_blocks_);
    chunk_count_ = std::max<std::size_t>(64, (block_count_ + parts * 64 - 1) / (parts * 64) * 64);
  }
  chunks_per_block_ = std::max<std::size_t>(1, (block_count_ + chunk_count_ - 1) / chunk_count_);
  n_chunks_ = n_blocks_ * chunks_per_block_;
  next_dealt_ = static_cast<std::size_t>(task.rank());
}

bool DirectReduction::work() {
  if (stuck_) return false;
  try {
    const std::uint64_t done = reduce_some();
    return claims_ ? all_counted(done) : all_dealt_done(done);
  } catch (const Unreachable&) {
    stuck_ = true;
    return false;
  }
}

/// Chunks that were this rank's, or that it has claimed. How many there were.
std::uint64_t DirectReduction::reduce_some() {
  std::uint64_t done = 0;
  for (; done < kChunksAtOnce && !out_of_chunks_; ++done) {
    const std::uint64_t chunk = next_chunk();
    out_of_chunks_ = chunk >= n_chunks_;
    if (out_of_chunks_) break;
    reduce(chunk);
  }
  return done;
}

bool DirectReduction::all_dealt_done(std::uint64_t done) {
  if (!out_of_chunks_) {
    if (done != 0) task_.engine->moved();
    return false;
  }
  if (!std::exchange(told_, true)) task_.set_step(1);
  return task_.all_at(1);
}

bool DirectReduction::all_counted(std::uint64_t done) {
  Arena& arena = *task_.group->arena;
  const std::size_t slot = task_.sequence % Arena::kSlots;
  std::uint64_t& finished = task_.group->finished[slot];
  if (done != 0) {
    arena.finished(task_.sequence).fetch_add(done, std::memory_order_acq_rel);
    arena.ring_bells(task_.rank());
    task_.engine->moved();
  }
  if (!out_of_chunks_ || arena.finished(task_.sequence).load(std::memory_order_acquire) != finished + n_chunks_)
    return false;
  finished += n_chunks_;
  task_.group->claimed[slot] += n_chunks_ + static_cast<std::uint64_t>(task_.size());  // each rank found none left once
  return true;
}

std::uint64_t DirectReduction::next_chunk() {
  if (claims_) {
    const std::uint64_t claimed = task_.group->claimed[task_.sequence % Arena::kSlots];
    return task_.group->arena->claimed(task_.sequence).fetch_add(1, std::memory_order_relaxed) - claimed;
  }
  const std::uint64_t chunk = next_dealt_;
  next_dealt_ += static_cast<std::size_t>(task_.size());
  return chunk;
}

/// A chunk of each rank's elements: where it lies, or brought here.
std::span<const kernels::Input> DirectReduction::inputs(std::size_t offset, std::size_t nbytes) {
  Host& host = *task_.group->host;
  std::vector<kernels::Input>& inputs = task_.group->inputs;
  inputs.resize(static_cast<std::size_t>(task_.size()));
  for (int rank = 0; rank < task_.size(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    const PostedBuffers& posted = task_.posted[i];
    const int member = task_.group->member(rank);
    inputs[i].factor = posted.factor;
    if (rank == task_.rank()) {
      inputs[i].data = static_cast<const std::byte*>(task_.in.data) + offset;
    } else if (const std::byte* here = host.at(member, posted.in, task_.in.nbytes()); here != nullptr) {
      inputs[i].data = here + offset;
    } else {
      std::byte* const place = task_.group->bounce.data() + i * nbytes;
      if (!host.pull(member, place, posted.in + offset, nbytes)) throw Unreachable();
      inputs[i].data = place;
    }
  }
  return inputs;
}

bool DirectReduction::wants(int rank, std::size_t block) const {
  return task_.verb == Verb::reduce_scatter ? static_cast<std::size_t>(rank) == block : task_.wanted_by(rank);
}

void DirectReduction::reduce(std::uint64_t chunk) {
  const std::size_t block = chunk / chunks_per_block_, first = chunk % chunks_per_block_ * chunk_count_;
  if (first >= block_count_) return;
  const std::size_t count = std::min(chunk_count_, block_count_ - first), nbytes = count * task_.itemsize();
  const std::size_t in_offset = (block * block_count_ + first) * task_.itemsize();
  const std::size_t out_offset = first * task_.itemsize();
  const auto size = static_cast<std::size_t>(task_.size());
  Host& host = *task_.group->host;
  std::vector<std::byte>& bounce = task_.group->bounce;
  if (bounce.size() < (size + 1) * nbytes) bounce.resize((size + 1) * nbytes);

  const std::span<const kernels::Input> from = inputs(in_offset, nbytes);
  std::vector<void*>& here = task_.group->outs;            // where the result can be stored
  std::vector<int>& through_kernel = task_.group->pushed;  // ranks whose memory it has to be pushed to
  here.clear();
  through_kernel.clear();
  for (int rank = 0; rank < task_.size(); ++rank) {
    if (!wants(rank, block)) continue;
    const std::uint64_t there = task_.posted_by(rank).out;
    if (rank == task_.rank()) {
      here.push_back(static_cast<std::byte*>(task_.out.data) + out_offset);
    } else if (std::byte* at = host.at(task_.group->member(rank), there, task_.out.nbytes())) {
      here.push_back(at + out_offset);
    } else {
      through_kernel.push_back(rank);
    }
  }
  if (here.empty()) here.push_back(bounce.data() + size * nbytes);
  kernels::reduce_into(task_.in.dtype, task_.reduction.op, from, here, count);
  for (const int rank : through_kernel) {
    const std::uint64_t to = task_.posted_by(rank).out + out_offset;
    if (!host.push(task_.group->member(rank), to, here[0], nbytes)) throw Unreachable();
  }
}

}  // namespace samestep
