#include "node/node_reduction.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

constexpr int kChunksAtOnce = 8;  // then others may have their turn

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

/// Elements of a chunk of `nbytes`, whole cache lines of them.
std::size_t chunk_elements(std::size_t nbytes, std::size_t itemsize) {
  return std::max<std::size_t>(64, nbytes / itemsize / 64 * 64);
}

}  // namespace

NodeReduction::NodeReduction(std::shared_ptr<Engine> shared_engine, const Signature& signature,
                             std::shared_ptr<NodeGroup> group, ConstBuffer in, Buffer out, const Reduction& reduction)
    : Collective(std::move(shared_engine), signature),
      group_(std::move(group)),
      in_(in),
      out_(out),
      reduction_(reduction),
      itemsize_(itemsize(in.dtype)),
      size_(engine().size()) {}

namespace {

void announce_reduction(Engine& engine, const NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                        ConstBuffer in, const Buffer* out, double factor) {
  const bool oversubscribed = engine.options().oversubscribed;
  NodeReduction::Posted posted{group.host->place_of(in.data, in.nbytes()),
                               out != nullptr ? group.host->place_of(out->data, out->nbytes()) : Host::kShared, factor,
                               0, oversubscribed};
  const bool shared = (posted.in & posted.out & Host::kShared) != 0;
  const bool few = in.nbytes() + sizeof posted <= engine.meeting().limit();
  posted.with_elements = few && !(shared && in.nbytes() >= Crossings::shared_from(oversubscribed));
  const Meeting::Bytes prefix(reinterpret_cast<const std::byte*>(&posted), sizeof posted);
  const Meeting::Bytes data(bytes(in.data), posted.with_elements ? in.nbytes() : 0);
  engine.meeting().announce(sequence, digest, data, prefix);
}

NodeReduction::Posted posted_in(Meeting::Bytes data) {
  NodeReduction::Posted posted;
  std::memcpy(&posted, data.data(), sizeof posted);
  return posted;
}

}  // namespace

void NodeReduction::announce(std::uint64_t digest) {
  announce_reduction(engine(), *group_, sequence_, digest, in_, wanted_by(engine().rank()) ? &out_ : nullptr,
                     reduction_.factor);
}

void NodeReduction::announce_all_reduce(Engine& engine, const NodeGroup& group, std::uint64_t sequence,
                                        std::uint64_t digest, ConstBuffer in, Buffer out, const Reduction& reduction) {
  announce_reduction(engine, group, sequence, digest, in, &out, reduction.factor);
}

bool NodeReduction::reduce_announced(Engine& engine, std::uint64_t sequence, ConstBuffer in, Buffer out, ReduceOp op) {
  constexpr std::size_t kMost = 16;
  std::array<kernels::Input, kMost> inputs;
  const auto size = static_cast<std::size_t>(engine.size());
  if (size > kMost) return false;
  for (std::size_t peer = 0; peer < size; ++peer) {
    const Meeting::Bytes data = engine.meeting().data(sequence, static_cast<int>(peer));
    const Posted posted = posted_in(data);
    if (!posted.with_elements) return false;
    inputs[peer] = {static_cast<int>(peer) == engine.rank() ? in.data : data.data() + sizeof posted, posted.factor};
  }
  kernels::reduce(in.dtype, op, std::span(inputs).first(size), out.data, in.count);
  return true;
}

void NodeReduction::gather() {
  posted_.resize(static_cast<std::size_t>(size_));
  elements_.resize(static_cast<std::size_t>(size_));
  for (int peer = 0; peer < size_; ++peer) {
    const Meeting::Bytes data = engine().meeting().data(sequence_, peer);
    posted_[static_cast<std::size_t>(peer)] = posted_in(data);
    elements_[static_cast<std::size_t>(peer)] = data.subspan(sizeof(Posted));
  }
}

bool NodeReduction::wanted_by(int rank) const { return signature().verb != Verb::reduce || rank == signature().root; }

bool NodeReduction::all_shared() const {
  for (int rank = 0; rank < size_; ++rank) {
    const Posted& posted = posted_[static_cast<std::size_t>(rank)];
    if ((posted.in & Host::kShared) == 0) return false;
    if (wanted_by(rank) && (posted.out & Host::kShared) == 0) return false;
  }
  return true;
}

void NodeReduction::reduce_together() {
  if (!wanted_by(engine().rank())) return;
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(size_));
  std::size_t skip = 0, count = in_.count;
  if (signature().verb == Verb::reduce_scatter) {
    count = out_.count;
    skip = static_cast<std::size_t>(engine().rank()) * out_.nbytes();
  }
  bool copies_back = false;
  for (int rank = 0; rank < size_; ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    const Posted& posted = posted_[i];
    const std::byte* data = elements_[i].data();
    if (!posted.with_elements && rank != engine().rank()) {
      data = group_->host->at(group_->member(rank), posted.in, in_.nbytes());
    }
    // Others read this rank's buffer where it lies: it must not change before they have.
    copies_back = copies_back || (!posted.with_elements && rank == engine().rank());
    inputs[i] = {rank == engine().rank() ? bytes(in_.data) + skip : data + skip, posted.factor};
  }
  void* into = out_.data;
  if (copies_back) {
    result_.resize(count * itemsize_);
    into = result_.data();
  }
  kernels::reduce(in_.dtype, reduction_.op, inputs, into, count);
}

void NodeReduction::start_work() {
  gather();
  const bool oversubscribed = posted_[0].oversubscribed != 0;
  const bool any_sent = std::any_of(posted_.begin(), posted_.end(), [](const Posted& p) { return p.with_elements; });
  const bool shared = !any_sent && all_shared();
  const std::size_t nbytes = in_.nbytes();
  if (!shared && nbytes + sizeof(Posted) <= engine().meeting().limit()) {
    reduce_together();
    set_step(1);
  } else if (shared || (group_->host->reaches_memory() && nbytes > Crossings::staged_to(oversubscribed))) {
    begin_direct();
  } else {
    begin_staged();
  }
}

bool NodeReduction::work() {
  // Buffers of a rank that has given up must not be touched; its farewell ends this operation soon.
  if (!group_->meeting->all_here(sequence_)) return false;
  switch (way_) {
    case Way::direct:
      try {
        return !stuck_ && work_direct();
      } catch (const Unreachable&) {
        stuck_ = true;
        return false;
      }
    case Way::staged:
      return work_staged();
    case Way::together: {
      const bool any_in_place =
          std::any_of(posted_.begin(), posted_.end(), [](const Posted& p) { return !p.with_elements; });
      if (any_in_place && !all_at(1)) return false;
      if (!result_.empty()) std::memcpy(out_.data, result_.data(), result_.size());
      break;
    }
  }
  return true;
}

// ---- direct

void NodeReduction::begin_direct() {
  way_ = Way::direct;
  n_blocks_ = signature().verb == Verb::reduce_scatter ? static_cast<std::size_t>(size_) : 1;
  block_count_ = in_.count / n_blocks_;
  chunk_count_ = chunk_elements(Crossings::kChunkBytes, itemsize_);
  claims_ = in_.count >= 2 * static_cast<std::size_t>(size_) * chunk_count_;
  if (!claims_) {  // one chunk for each rank, so that it stays in the caches it is in
    const std::size_t parts = static_cast<std::size_t>(size_) / std::gcd(static_cast<std::size_t>(size_), n_blocks_);
    chunk_count_ = std::max<std::size_t>(64, (block_count_ + parts * 64 - 1) / (parts * 64) * 64);
  }
  chunks_per_block_ = std::max<std::size_t>(1, (block_count_ + chunk_count_ - 1) / chunk_count_);
  n_chunks_ = n_blocks_ * chunks_per_block_;
  next_dealt_ = static_cast<std::size_t>(engine().rank());
}

bool NodeReduction::work_direct() {
  Arena& arena = *group_->arena;
  std::uint64_t& claimed = group_->claimed[sequence_ % Arena::kSlots];
  std::uint64_t& finished = group_->finished[sequence_ % Arena::kSlots];
  std::uint64_t done = 0;
  for (int i = 0; i < kChunksAtOnce && !out_of_chunks_; ++i) {
    std::uint64_t chunk = next_dealt_;
    if (claims_) {
      chunk = arena.claimed(sequence_).fetch_add(1, std::memory_order_relaxed) - claimed;
    } else {
      next_dealt_ += static_cast<std::size_t>(size_);
    }
    if (chunk >= n_chunks_) {
      out_of_chunks_ = true;
      break;
    }
    const std::size_t first = chunk % chunks_per_block_ * chunk_count_;
    if (first < block_count_) {
      reduce_chunk(chunk / chunks_per_block_, first, std::min(chunk_count_, block_count_ - first));
    }
    ++done;
  }
  if (done != 0) arena.finished(sequence_).fetch_add(done, std::memory_order_acq_rel);
  if (!out_of_chunks_ || arena.finished(sequence_).load(std::memory_order_acquire) != finished + n_chunks_)
    return false;
  finished += n_chunks_;
  if (claims_) claimed += n_chunks_ + static_cast<std::uint64_t>(size_);  // each rank found none left once
  return true;
}

void NodeReduction::reduce_chunk(std::size_t block, std::size_t first, std::size_t count) {
  const std::size_t nbytes = count * itemsize_;
  const std::size_t in_offset = (block * block_count_ + first) * itemsize_, out_offset = first * itemsize_;
  const auto size = static_cast<std::size_t>(size_);
  Host& host = *group_->host;
  std::vector<std::byte>& bounce = group_->bounce;
  if (bounce.size() < (size + 1) * nbytes) bounce.resize((size + 1) * nbytes);

  std::vector<kernels::Input> inputs(size);
  for (int rank = 0; rank < size_; ++rank) {
    const Posted& posted = posted_[static_cast<std::size_t>(rank)];
    kernels::Input& input = inputs[static_cast<std::size_t>(rank)];
    input.factor = posted.factor;
    if (rank == engine().rank()) {
      input.data = bytes(in_.data) + in_offset;
    } else if (const std::byte* here = host.at(group_->member(rank), posted.in, in_.nbytes()); here != nullptr) {
      input.data = here + in_offset;
    } else {
      std::byte* const place = bounce.data() + static_cast<std::size_t>(rank) * nbytes;
      if (!host.pull(group_->member(rank), place, posted.in + in_offset, nbytes)) throw Unreachable();
      input.data = place;
    }
  }

  std::vector<void*> here;          // where the result can be stored
  std::vector<int> through_kernel;  // ranks whose memory it has to be pushed to
  for (int rank = 0; rank < size_; ++rank) {
    const bool wanted =
        signature().verb == Verb::reduce_scatter ? static_cast<std::size_t>(rank) == block : wanted_by(rank);
    if (!wanted) continue;
    if (rank == engine().rank()) {
      here.push_back(static_cast<std::byte*>(out_.data) + out_offset);
    } else if (std::byte* at =
                   host.at(group_->member(rank), posted_[static_cast<std::size_t>(rank)].out, out_.nbytes())) {
      here.push_back(at + out_offset);
    } else {
      through_kernel.push_back(rank);
    }
  }
  if (here.empty()) here.push_back(bounce.data() + size * nbytes);
  kernels::reduce_into(in_.dtype, reduction_.op, inputs, here, count);
  for (const int rank : through_kernel) {
    const std::uint64_t to = posted_[static_cast<std::size_t>(rank)].out + out_offset;
    if (!host.push(group_->member(rank), to, here[0], nbytes)) throw Unreachable();
  }
}

// ---- staged

void NodeReduction::begin_staged() {
  way_ = Way::staged;
  // Short ones in one go; long ones in pieces of which three fit the cache.
  const std::size_t window = in_.nbytes() <= Arena::kStageBytes ? Arena::kStageBytes : Arena::kStageBytes / 4;
  constexpr std::size_t kRounding = 512;  // a plan may make pieces a little longer
  const std::size_t piece =
      std::max<std::size_t>(1, (window / static_cast<std::size_t>(size_) - kRounding) / itemsize_);
  plan_ = signature().verb == Verb::reduce_scatter ? WindowPlan::of_blocks(size_, out_.count, piece)
                                                   : WindowPlan::of_buffer(size_, in_.count, piece);
  piece_bytes_ = plan_.longest() * itemsize_;
}

std::byte* NodeReduction::staged(int rank, std::size_t window, int owner) {
  return group_->arena->stage(rank, window) + static_cast<std::size_t>(owner) * piece_bytes_;
}

bool NodeReduction::stage_is_free() {
  if (step_ != 0) return all_at(step_);
  return group_->stages_used_by == 0 || group_->meeting->released_by_all(group_->stages_used_by - 1);
}

bool NodeReduction::work_staged() {
  const std::size_t windows = plan_.windows();
  while (step_ < windows + 2) {
    if (!stage_is_free()) return false;
    const std::size_t k = step_;
    if (k >= 2) copy_out(k - 2);
    if (k < windows) copy_in(k);
    if (k >= 1 && k <= windows) reduce_own(k - 1);
    set_step(++step_);
  }
  group_->stages_used_by = sequence_ + 1;
  return true;
}

void NodeReduction::copy_in(std::size_t window) {
  for (int owner = 0; owner < size_; ++owner) {
    const Chunk chunk = plan_.chunk(window, owner);
    if (owner == engine().rank() || chunk.count == 0) continue;
    std::memcpy(staged(engine().rank(), window, owner), bytes(in_.data) + chunk.in_offset * itemsize_,
                chunk.count * itemsize_);
  }
}

void NodeReduction::reduce_own(std::size_t window) {
  const int me = engine().rank();
  const Chunk chunk = plan_.chunk(window, me);
  if (chunk.count == 0) return;
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) {
    const void* data = rank == me ? bytes(in_.data) + chunk.in_offset * itemsize_ : staged(rank, window, me);
    inputs[static_cast<std::size_t>(rank)] = {data, posted_[static_cast<std::size_t>(rank)].factor};
  }
  const bool keeps = wanted_by(me), gives = signature().verb != Verb::reduce_scatter;
  std::byte* const own = keeps ? static_cast<std::byte*>(out_.data) + chunk.out_offset * itemsize_ : nullptr;
  void* const outs[] = {own, staged(me, window, me)};
  const std::span<void* const> wanted(outs + (keeps ? 0 : 1), (keeps ? 1U : 0U) + (gives ? 1U : 0U));
  kernels::reduce_into(in_.dtype, reduction_.op, inputs, wanted, chunk.count);
}

void NodeReduction::copy_out(std::size_t window) {
  if (signature().verb == Verb::reduce_scatter || !wanted_by(engine().rank())) return;
  for (int step = 1; step < size_; ++step) {
    const int owner = (engine().rank() + step) % size_;
    const Chunk chunk = plan_.chunk(window, owner);
    if (chunk.count == 0) continue;
    std::memcpy(static_cast<std::byte*>(out_.data) + chunk.out_offset * itemsize_, staged(owner, window, owner),
                chunk.count * itemsize_);
  }
}

// ---- steps

void NodeReduction::set_step(std::uint64_t step) { group_->arena->set_step(sequence_, engine().rank(), step); }

bool NodeReduction::all_at(std::uint64_t step) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != engine().rank() && !group_->arena->is_at(sequence_, rank, step)) return false;
  }
  return true;
}

std::vector<int> NodeReduction::awaited() {
  std::vector<int> late;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != engine().rank() && group_->arena->released(rank).load(std::memory_order_acquire) <= sequence_)
      late.push_back(rank);
  }
  return late;
}

}  // namespace samestep
